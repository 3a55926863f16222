"""What a launcher refuses, what it tells its processes, and that they must answer."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import pytest
from pytest_mock import MockerFixture
from wiring_stand_ins import CONFIRMED, SETTINGS, from_cli, launched, server

from sglang_spec_ext import args, observe
from sglang_spec_ext.args import Settings, SettingsError
from sglang_spec_ext.compat import workers
from sglang_spec_ext.wiring import drafting, launcher
from sglang_spec_ext.wiring.failure import NotBoundError, explain

pytestmark = pytest.mark.usefixtures("bindings")


@pytest.mark.usefixtures("api")
def test_combinations_are_refused_on_the_resolved_record() -> None:
    with pytest.raises(SettingsError, match="--pp-size above 1"):
        launcher.check_server_args(lambda record: None, server(SETTINGS, pp_size=2))
    assert launcher.check_server_args(lambda record: "ok", server(SETTINGS)) == "ok"
    assert launcher.check_server_args(lambda record: "ok", server(None, pp_size=2)) == "ok"


@pytest.mark.usefixtures("api")
def test_so_is_a_worker_without_a_target_only_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "unfit", lambda arguments: workers.V2)
    with pytest.raises(SettingsError, match="the spec-v2 worker"):
        launcher.check_server_args(lambda record: None, server(SETTINGS))
    assert launcher.check_server_args(lambda record: "ok", server(None)) == "ok"


@pytest.mark.usefixtures("api")
def test_a_refusal_on_the_command_line_is_one_line_and_the_end() -> None:
    from_cli("--model-path", "m")
    with pytest.raises(SystemExit, match="--pp-size above 1"):
        launcher.check_server_args(lambda record: None, server(SETTINGS, pp_size=2))


@pytest.mark.usefixtures("api")
@pytest.mark.parametrize("asked", [None, "warn"])
def test_the_draft_is_checked_on_the_resolved_record(
    mocker: MockerFixture, asked: str | None
) -> None:
    run = mocker.patch.object(launcher.draft_check, "run", side_effect=SettingsError("bad draft"))
    drafting.prepare("EAGLE3", asked)
    record = server(None)
    with pytest.raises(SettingsError, match="bad draft"):
        launcher.check_server_args(lambda record: "ok", record)
    run.assert_called_once_with(record, asked or "stop")
    record.speculative_algorithm = None
    assert launcher.check_server_args(lambda record: "ok", record) == "ok"


@pytest.mark.usefixtures("api")
def test_a_bad_draft_on_the_command_line_is_one_message_and_the_end(mocker: MockerFixture) -> None:
    mocker.patch.object(launcher.draft_check, "run", side_effect=SettingsError("bad draft"))
    from_cli("--model-path", "m")
    with pytest.raises(SystemExit, match="sglang_spec_ext: error: bad draft"):
        launcher.check_server_args(lambda record: None, server(None))


def cap_seen(record: Any) -> Any:
    """What SGLang's own default of 48 would do to the record."""
    seen = record.max_running_requests
    if seen is None:
        record.max_running_requests = 48
    return seen


@pytest.mark.usefixtures("api")
@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [(SETTINGS, None, None), (SETTINGS, 16, 16), (None, None, 48), (None, 16, 16)],
)
def test_the_default_cap_does_not_hide_the_threshold(
    settings: Settings | None, before: int | None, after: int | None
) -> None:
    record = server(settings)
    record.max_running_requests = before
    launcher.admission_cap(cap_seen, record)
    assert record.max_running_requests == after


def launch(record: Any, result: Any, variable: str = args.WORKER_ENV) -> tuple[Any, str | None]:
    """Launch, and what the spawned processes would have seen in a variable."""
    seen: list[str | None] = []

    def original(cls: Any, server_args: Any, *, init: Callable[[], None]) -> Any:
        assert (cls, server_args) == ("engine class", record)
        seen.append(os.environ.get(variable))
        return result

    made = launcher.launch_subprocesses(
        original,
        "engine class",
        server_args=record,
        init=lambda: None,  # type: ignore[arg-type]
    )
    return made, seen[0]


def test_the_first_releases_launch_by_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def original(server_args: Any, init: Any) -> Any:
        seen.update(os.environ)
        return ("tokenizer", "template", [CONFIRMED], "ports")

    monkeypatch.setattr(workers, "to_env", lambda arguments: {"KIND": "spec-v1"})
    made = launcher.launch_subprocesses_function(original, server_args=server(SETTINGS), init=None)
    assert made[2] == [CONFIRMED]
    assert args.from_worker_env(seen) == SETTINGS
    assert seen["KIND"] == "spec-v1", "the processes are told which worker they run"
    assert "KIND" not in os.environ


def test_a_process_that_the_first_releases_spawn_must_confirm_too() -> None:
    def original(server_args: Any) -> Any:
        return ("tokenizer", "template", [{}], "ports")

    with pytest.raises(NotBoundError, match="scheduler process 0"):
        launcher.launch_subprocesses_function(original, server(SETTINGS))


def test_the_settings_reach_the_spawned_processes_and_no_later_ones() -> None:
    made, seen = launch(server(SETTINGS), launched(CONFIRMED))
    assert made == launched(CONFIRMED)
    assert seen is not None
    assert args.from_worker_env({args.WORKER_ENV: seen}) == SETTINGS
    assert args.WORKER_ENV not in os.environ


def test_a_launch_without_settings_is_left_alone() -> None:
    made, seen = launch(server(None), launched({}))
    assert made == launched({})
    assert seen is None


@pytest.mark.parametrize("settings", [None, SETTINGS])
def test_a_launch_with_a_draft_tells_the_schedulers(settings: Settings | None) -> None:
    _, seen = launch(server(settings), launched(CONFIRMED), args.DRAFTING_WORKER_ENV)
    assert seen is not None
    told = args.drafting_from_worker_env({args.DRAFTING_WORKER_ENV: seen})
    assert told == args.Drafting(hooks=True, check="stop")
    assert args.DRAFTING_WORKER_ENV not in os.environ


@pytest.mark.parametrize("settings", [None, SETTINGS])
def test_and_which_of_two_workers_they_run(
    settings: Settings | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "to_env", lambda arguments: {"KIND": "spec-v1"})
    assert launch(server(settings), launched(CONFIRMED), "KIND")[1] == "spec-v1"
    record = server(None)
    record.speculative_algorithm = None
    assert launch(record, launched({}), "KIND")[1] is None


def test_a_launch_without_a_draft_tells_them_nothing() -> None:
    record = server(None)
    record.speculative_algorithm = None
    assert launch(record, launched({}), args.DRAFTING_WORKER_ENV)[1] is None


def test_a_launch_whose_scheduler_is_silent_fails() -> None:
    with pytest.raises(NotBoundError, match="scheduler process 0"):
        launch(server(SETTINGS), launched({}))


@pytest.mark.parametrize("before", [None, "", "x"])
def test_the_environment_is_restored_also_after_an_exception(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("A_VARIABLE", raising=False)
    else:
        monkeypatch.setenv("A_VARIABLE", before)
    with pytest.raises(KeyError), launcher._environment({"A_VARIABLE": "y"}):
        assert os.environ["A_VARIABLE"] == "y"
        raise KeyError
    assert os.environ.get("A_VARIABLE") == before


def test_confirmed_by_every_scheduler_process() -> None:
    launcher._require_confirmation(launched(CONFIRMED, {**CONFIRMED, "max_req_len": 9}))
    # as the first releases have it
    launcher._require_confirmation(("tokenizer", "template", [CONFIRMED, CONFIRMED], "ports"))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (launched(CONFIRMED, {}), "scheduler process 1 did not load the plugin"),
        (launched({observe.CONFIRMATION: False}), "scheduler process 0 did not load the plugin"),
        (launched(), "no scheduler process reported to the launcher"),
        (("tokenizer", "template", [CONFIRMED, {}], None), "scheduler process 1 did not load the"),
        (("tokenizer", None), "no scheduler process reported to the launcher"),
    ],
)
def test_a_silent_scheduler_process_stops_the_start(result: Any, said: str) -> None:
    with pytest.raises(NotBoundError) as caught:
        launcher._require_confirmation(result)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    (line,) = lines
    assert line.startswith(f"  - {said}")


def test_without_package_metadata_the_message_still_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "SGLang without package metadata" in explain(["x"])
