"""Our flags on the command line and our keywords of Engine(**kwargs), onto the record."""

from __future__ import annotations

from typing import Any

import pytest
from wiring_stand_ins import DOOR, FLAG, LAUNCHER_NAMES, SETTINGS, Bindings, Record, from_cli

from sglang_spec_ext import args
from sglang_spec_ext.args import Settings, SettingsError
from sglang_spec_ext.wiring import arguments
from sglang_spec_ext.wiring.asked import asked

pytestmark = pytest.mark.usefixtures("bindings")


def test_command_line_without_the_flag_changes_nothing(bindings: Bindings) -> None:
    record = from_cli("--model-path", "m")
    assert args.read_stamp(record) is None
    assert bindings.calls == []


def test_command_line_with_the_flag_binds_and_stamps(bindings: Bindings) -> None:
    record = from_cli(FLAG, "4")
    assert args.read_stamp(record) == Settings(4, 4, 4)
    assert bindings.bound.keys() == LAUNCHER_NAMES


def test_bad_command_line_exits_with_one_line() -> None:
    with pytest.raises(SystemExit) as caught:
        from_cli(FLAG, "-1")
    assert str(caught.value).startswith(f"sglang_spec_ext: error: {FLAG} '-1' is not")


def test_command_line_on_a_release_that_has_moved_exits(bindings: Bindings) -> None:
    bindings.gaps = ["here.it.was: not found in here"]
    with pytest.raises(SystemExit, match=r"here\.it\.was"):
        from_cli(FLAG, "4")


def test_keywords_that_are_not_ours_pass_through() -> None:
    record = arguments.from_keywords(Record, model_path="m")
    assert isinstance(record, Record)
    assert record.kwargs == {"model_path": "m"}
    assert args.read_stamp(record) is None


def test_our_keywords_are_taken_out(bindings: Bindings) -> None:
    record = arguments.from_keywords(Record, model_path="m", speculative_disable_batch_threshold=4)
    assert record.kwargs == {"model_path": "m"}
    assert args.read_stamp(record) == Settings(4, 4, 4)
    assert bindings.bound.keys() == LAUNCHER_NAMES


def test_a_bad_keyword_is_an_exception_of_the_caller() -> None:
    before = Record.created
    with pytest.raises(SettingsError, match="speculative_disable_batch_threshold -1"):
        arguments.from_keywords(Record, speculative_disable_batch_threshold=-1)
    assert Record.created == before


def test_settings_are_known_while_the_record_is_built() -> None:
    seen: list[Settings | None] = []

    class Resolving(Record):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            seen.append(asked.settings_of(self))

    arguments.from_keywords(Resolving, speculative_disable_batch_threshold=4)
    arguments.from_keywords(Resolving)
    assert seen == [Settings(4, 4, 4), None]


def test_a_record_that_fails_to_build_leaves_no_settings_behind() -> None:
    def fail() -> Any:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        arguments._construct(SETTINGS, fail)
    assert asked.settings_of(Record()) is None


def test_the_stamp_wins_over_the_environment_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOOR, "9")
    record = Record()
    assert asked.settings_of(record) == Settings(9, 9, 4)
    args.stamp(record, SETTINGS)
    assert asked.settings_of(record) == SETTINGS


def test_a_wrong_mode_of_the_check_exits_with_one_line() -> None:
    with pytest.raises(SystemExit, match="sglang_spec_ext: error: --speculative-draft-check 'no'"):
        from_cli("--speculative-draft-check", "no")
