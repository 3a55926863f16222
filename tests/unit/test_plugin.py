"""What the entry point binds in which process, and that a failure to bind is never silent."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from sglang_spec_ext import args, observe, plugin
from sglang_spec_ext.args import Settings, SettingsError
from sglang_spec_ext.compat import contracts, hooks, workers
from sglang_spec_ext.compat.contracts import ARGUMENT_SEAM, LAUNCHER, LOADING, SCHEDULER, TouchPoint
from sglang_spec_ext.policy import Mode

FLAG = "--speculative-disable-batch-threshold"
DOOR = "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD"
SETTINGS = Settings(4, 3, 2)
SEAM = {"add_cli_args", "from_cli_args", "server_args_class"}
DRAFTING_LAUNCHER = {"check_server_args", "launch_subprocesses"}
LAUNCHER_NAMES = {point.name for point in LAUNCHER}
SCHEDULER_NAMES = {point.name for point in SCHEDULER}
LOADING_NAMES = {point.name for point in LOADING}


class Record:
    """Stands for ServerArgs."""

    created = 0

    def __init__(self, **kwargs: Any) -> None:
        type(self).created += 1
        self.kwargs = kwargs


class Bindings:
    """Stands for `hooks`: remembers what is bound, and fails where told to."""

    def __init__(self) -> None:
        self.bound: dict[str, hooks.Hook] = {}
        self.calls: list[set[str]] = []
        self.refuse: set[str] = set()
        self.gaps: list[str] = []

    def bind(self, asked: dict[TouchPoint, hooks.Hook]) -> list[str]:
        self.calls.append({point.name for point in asked})
        good = {p.name: h for p, h in asked.items() if p.name not in self.refuse}
        self.bound.update(good)
        return [p.target for p in asked if p.name in self.refuse]

    def is_bound(self, point: TouchPoint, hook: hooks.Hook) -> bool:
        return self.bound.get(point.name) is hook

    def check(self, *_: Any, **__: Any) -> list[str]:
        return self.gaps


@pytest.fixture(autouse=True)
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    made = Bindings()
    monkeypatch.setattr(plugin.hooks, "bind", made.bind)
    monkeypatch.setattr(plugin.hooks, "is_bound", made.is_bound)
    monkeypatch.setattr(plugin.contracts, "check", made.check)
    monkeypatch.setattr(plugin.workers, "contract", lambda site=None: workers.V2)
    monkeypatch.setattr(plugin, "_started_from_command_line", False)
    monkeypatch.setattr(plugin, "_worker_settings", None)
    monkeypatch.setattr(plugin, "_runtime_state", None)
    monkeypatch.setattr(plugin._metrics, "counts", None)
    monkeypatch.setattr(plugin, "_asked_check_mode", None)
    ours = (args.WORKER_ENV, args.DRAFTING_WORKER_ENV, args.HOOKS_ENV, args.CHECK_ENV)
    for name in (*ours, *args.ENV_NAMES.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, plugin._SCHEDULER_MODULE, raising=False)
    return made


@pytest.fixture
def sglang_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.99")


def worker_process(monkeypatch: pytest.MonkeyPatch, settings: Settings, *, scheduler: bool) -> None:
    for name, value in settings.to_env().items():
        monkeypatch.setenv(name, value)
    if scheduler:
        name = plugin._SCHEDULER_MODULE
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


# ---------------------------------------------------------------------------- roles


def test_launcher_without_the_flag_binds_the_argument_seam_only(
    bindings: Bindings,
) -> None:
    plugin.register()
    assert bindings.bound.keys() == SEAM
    assert plugin.verify_bound() == []


def test_launcher_with_the_environment_door_binds_its_hooks_too(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DOOR, "4")
    plugin.register()
    assert bindings.bound.keys() == SEAM | LAUNCHER_NAMES


def test_scheduler_process_binds_the_scheduler_hooks_only(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_process(monkeypatch, SETTINGS, scheduler=True)
    monkeypatch.setenv(DOOR, "9")  # inherited from the launcher
    plugin.register()
    assert bindings.bound.keys() == SCHEDULER_NAMES
    assert plugin._worker_settings == SETTINGS
    assert plugin.verify_bound() == []


def test_other_spawned_processes_bind_nothing(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_process(monkeypatch, SETTINGS, scheduler=False)
    plugin.register()
    assert bindings.calls == []


@pytest.mark.parametrize("contract", workers.CONTRACTS)
def test_every_touch_point_that_is_hooked_has_a_hook(
    contract: workers.Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.workers, "contract", lambda site=None: contract)
    for bound, points in (
        (plugin._launcher_hooks(), contract.launcher),
        (plugin._scheduler_hooks(), contract.scheduler),
    ):
        assert {p.name for p in bound} == {p.name for p in points}
        assert set(bound) <= set(points)
    # a bind is proved by identity: the hook must be the same object each time
    for made in (plugin._launcher_hooks, plugin._scheduler_hooks):
        assert all(hook is made()[point] for point, hook in made().items())


def test_register_twice_does_no_harm(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOOR, "4")
    plugin.register()
    once = dict(bindings.bound)
    plugin.register()
    assert bindings.bound == once


# ------------------------------------------------------------------------ with a draft, any server


@pytest.mark.parametrize(
    ("environment", "bound"),
    [
        ({}, {*LOADING_NAMES, "resolve_spec_tokens"}),
        ({"hooks": False}, {"resolve_spec_tokens"}),
        ({"check": "off"}, LOADING_NAMES),
        ({"hooks": False, "check": "off"}, set()),
    ],
)
def test_a_scheduler_with_a_draft_and_no_flag(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch, environment: Any, bound: set[str]
) -> None:
    asked = {"hooks": True, "check": "stop", **environment}
    for name, value in args.drafting_to_env(**asked).items():
        monkeypatch.setenv(name, value)
    plugin.register()
    assert bindings.calls == []  # no scheduler process
    name = plugin._SCHEDULER_MODULE
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    plugin.register()
    assert bindings.bound.keys() == bound
    assert plugin.verify_bound() == []


def test_with_the_flag_the_scheduler_has_both(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_process(monkeypatch, SETTINGS, scheduler=True)
    for name, value in args.drafting_to_env(hooks=True, check="stop").items():
        monkeypatch.setenv(name, value)
    plugin.register()
    assert bindings.calls == [SCHEDULER_NAMES, {*LOADING_NAMES, "resolve_spec_tokens"}]
    assert bindings.bound.keys() == SCHEDULER_NAMES | LOADING_NAMES


@pytest.mark.parametrize(("check", "watched"), [("off", set()), ("stop", {"process_decode"})])
@pytest.mark.parametrize(
    ("contract", "besides"), [(workers.V1, set()), (workers.FIRST_V1, {"draft_positions"})]
)
def test_with_a_draft_and_no_flag_older_releases_are_mended_and_watched(
    bindings: Bindings,
    monkeypatch: pytest.MonkeyPatch,
    contract: workers.Contract,
    besides: set[str],
    check: str,
    watched: set[str],
) -> None:
    monkeypatch.setattr(plugin.workers, "contract", lambda site=None: contract)
    monkeypatch.setitem(sys.modules, plugin._SCHEDULER_MODULE, ModuleType("scheduler"))
    for name, value in args.drafting_to_env(hooks=True, check=check).items():
        monkeypatch.setenv(name, value)
    plugin.register()
    mended = {"device_graphs", "target_embeds", "draft_embeds", *besides}
    assert bindings.bound.keys() == LOADING_NAMES | mended | watched


def test_what_nobody_asked_for_only_warns_when_it_cannot_bind(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bindings.gaps = ["here.it.was: not found in here"]
    from_cli("--speculative-algorithm", "EAGLE3")
    assert bindings.calls == []
    assert "here.it.was: not found" in caplog.text


@pytest.mark.parametrize(
    ("line", "environment", "bound"),
    [
        (("--speculative-algorithm", "EAGLE3"), {}, DRAFTING_LAUNCHER),
        (("--speculative-algorithm", "EAGLE"), {}, DRAFTING_LAUNCHER),
        (("--speculative-algorithm", "EAGLE", "--speculative-draft-check", "off"), {}, set()),
        (("--speculative-algorithm", "EAGLE3", "--speculative-draft-check", "off"), {},
         DRAFTING_LAUNCHER),
        (("--speculative-algorithm", "EAGLE3", "--speculative-draft-check", "off"),
         {args.HOOKS_ENV: "0"}, set()),
        (("--speculative-algorithm", "NGRAM"), {}, set()),
        ((), {}, set()),
    ],
)  # fmt: skip
def test_a_launcher_with_a_draft_and_no_flag(
    bindings: Bindings,
    monkeypatch: pytest.MonkeyPatch,
    line: tuple[str, ...],
    environment: dict[str, str],
    bound: set[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    from_cli(*line)
    assert bindings.bound.keys() == bound


def test_a_launcher_whose_arguments_we_do_not_see_can_ask_for_hooks(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(args.HOOKS_ENV, "1")
    plugin.register()
    assert bindings.bound.keys() == SEAM | DRAFTING_LAUNCHER


def test_a_wrong_mode_of_the_check_exits_with_one_line() -> None:
    with pytest.raises(SystemExit, match="sglang_spec_ext: error: --speculative-draft-check 'no'"):
        from_cli("--speculative-draft-check", "no")


@pytest.mark.usefixtures("api")
@pytest.mark.parametrize("asked", [None, "warn"])
def test_the_draft_is_checked_on_the_resolved_record(
    mocker: MockerFixture, asked: str | None
) -> None:
    run = mocker.patch.object(plugin.draft_check, "run", side_effect=SettingsError("bad draft"))
    plugin._prepare_drafting("EAGLE3", asked)
    record = server(None)
    with pytest.raises(SettingsError, match="bad draft"):
        plugin._check_server_args(lambda record: "ok", record)
    run.assert_called_once_with(record, asked or "stop")
    record.speculative_algorithm = None
    assert plugin._check_server_args(lambda record: "ok", record) == "ok"


@pytest.mark.usefixtures("api")
def test_a_bad_draft_on_the_command_line_is_one_message_and_the_end(mocker: MockerFixture) -> None:
    mocker.patch.object(plugin.draft_check, "run", side_effect=SettingsError("bad draft"))
    from_cli("--model-path", "m")
    with pytest.raises(SystemExit, match="sglang_spec_ext: error: bad draft"):
        plugin._check_server_args(lambda record: None, server(None))


# ---------------------------------------------------------------------------- failing loudly


@pytest.mark.usefixtures("sglang_version")
def test_scheduler_process_that_cannot_bind_exits(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_process(monkeypatch, SETTINGS, scheduler=True)
    bindings.refuse = {"init_info"}
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    message = str(caught.value)
    assert message.startswith(f"sglang_spec_ext: error: {FLAG} cannot take effect")
    assert "with SGLang 0.5.99" in message
    assert "\n  - sglang.srt.managers.scheduler.Scheduler.get_init_info\n" in message
    assert f"Works with SGLang {workers.supported()}." in message
    assert "tools/verify_imports.py" in message
    assert f"start without {FLAG}" in message


@pytest.mark.parametrize("fault", ["gap", "bind"])
def test_launcher_that_cannot_bind_exits(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv(DOOR, "4")
    if fault == "gap":
        bindings.gaps = ["here.it.was: not found in here"]
    else:
        bindings.refuse = {"admission_cap"}
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    named = "here.it.was: not found" if fault == "gap" else "_handle_eagle_family"
    assert named in str(caught.value)


def test_a_bad_environment_door_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOOR, "many")
    with pytest.raises(SystemExit, match=f"sglang_spec_ext: error: {DOOR} 'many'"):
        plugin.register()


def test_without_the_flag_a_missing_seam_only_warns(
    bindings: Bindings, caplog: pytest.LogCaptureFixture
) -> None:
    bindings.gaps = ["the.seam: not found in the"]
    plugin.register()
    assert "the.seam: not found" in caplog.text
    assert bindings.bound == {}


def test_verify_bound_names_what_is_not_bound(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugin.verify_bound() == [point.target for point in ARGUMENT_SEAM]
    worker_process(monkeypatch, SETTINGS, scheduler=True)
    expected = [point.target for point in contracts.in_use(SCHEDULER)]
    assert plugin.verify_bound() == expected
    assert len(expected) == len(SCHEDULER_NAMES)


def launched(*infos: dict[str, Any]) -> tuple[Any, ...]:
    return ("tokenizer", "template", SimpleNamespace(scheduler_infos=list(infos)), None)


CONFIRMED = {observe.CONFIRMATION: True}


def test_confirmed_by_every_scheduler_process() -> None:
    plugin._require_confirmation(launched(CONFIRMED, {**CONFIRMED, "max_req_len": 9}))
    # as the first releases have it
    plugin._require_confirmation(("tokenizer", "template", [CONFIRMED, CONFIRMED], "ports"))


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
    with pytest.raises(plugin.NotBoundError) as caught:
        plugin._require_confirmation(result)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    (line,) = lines
    assert line.startswith(f"  - {said}")


def test_without_package_metadata_the_message_still_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "SGLang without package metadata" in plugin._explain(["x"])


# ---------------------------------------------------------------------------- arguments


def parse(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()

    def original(parser: argparse.ArgumentParser) -> str:
        parser.add_argument("--model-path")
        parser.add_argument("--speculative-algorithm")
        return "returned"

    assert plugin._add_cli_args(original, parser) == "returned"
    return parser.parse_args(list(line))


def from_cli(*line: str) -> Any:
    return plugin._from_cli_args(lambda cls, namespace: cls(), Record, parse(*line))


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
    record = plugin._from_keywords(Record, model_path="m")
    assert isinstance(record, Record)
    assert record.kwargs == {"model_path": "m"}
    assert args.read_stamp(record) is None


def test_our_keywords_are_taken_out(bindings: Bindings) -> None:
    record = plugin._from_keywords(Record, model_path="m", speculative_disable_batch_threshold=4)
    assert record.kwargs == {"model_path": "m"}
    assert args.read_stamp(record) == Settings(4, 4, 4)
    assert bindings.bound.keys() == LAUNCHER_NAMES


def test_a_bad_keyword_is_an_exception_of_the_caller() -> None:
    before = Record.created
    with pytest.raises(SettingsError, match="speculative_disable_batch_threshold -1"):
        plugin._from_keywords(Record, speculative_disable_batch_threshold=-1)
    assert Record.created == before


def test_settings_are_known_while_the_record_is_built() -> None:
    seen: list[Settings | None] = []

    class Resolving(Record):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            seen.append(plugin._settings_of(self))

    plugin._from_keywords(Resolving, speculative_disable_batch_threshold=4)
    plugin._from_keywords(Resolving)
    assert seen == [Settings(4, 4, 4), None]


def test_a_record_that_fails_to_build_leaves_no_settings_behind() -> None:
    def fail() -> Any:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        plugin._construct(SETTINGS, fail)
    assert plugin._settings_of(Record()) is None


def test_the_stamp_wins_over_the_environment_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DOOR, "9")
    record = Record()
    assert plugin._settings_of(record) == Settings(9, 9, 4)
    args.stamp(record, SETTINGS)
    assert plugin._settings_of(record) == SETTINGS


# ---------------------------------------------------------------------------- launcher hooks


class FakeAPI(ModuleType):
    """Stands for `compat.sglang_api`, which needs torch."""

    @staticmethod
    def resolved(record: Any) -> Any:
        return record

    @staticmethod
    def decide(record: Any, **fields: Any) -> None:
        vars(record).update(fields)

    @staticmethod
    def metrics_collector(scheduler: Any) -> None:
        return None


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_spec_ext import compat

    name = "sglang_spec_ext.compat.sglang_api"
    module = FakeAPI(name)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compat, "sglang_api", module, raising=False)


def server(settings: Settings | None, **fields: Any) -> Any:
    record = SimpleNamespace(speculative_algorithm="EAGLE3", max_running_requests=None, **fields)
    if settings is not None:
        args.stamp(record, settings)
    return record


@pytest.mark.usefixtures("api")
def test_combinations_are_refused_on_the_resolved_record() -> None:
    with pytest.raises(SettingsError, match="--pp-size above 1"):
        plugin._check_server_args(lambda record: None, server(SETTINGS, pp_size=2))
    assert plugin._check_server_args(lambda record: "ok", server(SETTINGS)) == "ok"
    assert plugin._check_server_args(lambda record: "ok", server(None, pp_size=2)) == "ok"


@pytest.mark.usefixtures("api")
def test_a_refusal_on_the_command_line_is_one_line_and_the_end() -> None:
    from_cli("--model-path", "m")
    with pytest.raises(SystemExit, match="--pp-size above 1"):
        plugin._check_server_args(lambda record: None, server(SETTINGS, pp_size=2))


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
    plugin._admission_cap(cap_seen, record)
    assert record.max_running_requests == after


def launch(record: Any, result: Any, variable: str = args.WORKER_ENV) -> tuple[Any, str | None]:
    """Launch, and what the spawned processes would have seen in a variable."""
    seen: list[str | None] = []

    def original(cls: Any, server_args: Any, *, init: Callable[[], None]) -> Any:
        assert (cls, server_args) == ("engine class", record)
        seen.append(os.environ.get(variable))
        return result

    made = plugin._launch_subprocesses(
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

    monkeypatch.setattr(plugin.workers, "to_env", lambda arguments: {"KIND": "spec-v1"})
    made = plugin._launch_subprocesses_function(original, server_args=server(SETTINGS), init=None)
    assert made[2] == [CONFIRMED]
    assert args.from_worker_env(seen) == SETTINGS
    assert seen["KIND"] == "spec-v1", "the processes are told which worker they run"
    assert "KIND" not in os.environ


def test_a_process_that_the_first_releases_spawn_must_confirm_too() -> None:
    def original(server_args: Any) -> Any:
        return ("tokenizer", "template", [{}], "ports")

    with pytest.raises(plugin.NotBoundError, match="scheduler process 0"):
        plugin._launch_subprocesses_function(original, server(SETTINGS))


@pytest.mark.parametrize("off", [True, False])
def test_tokens_of_target_only_steps_are_counted_where_the_scheduler_commits_them(
    off: bool, mocker: MockerFixture
) -> None:
    pytest.importorskip("torch")
    counts = mocker.patch.object(plugin._metrics, "counts")
    result = SimpleNamespace(next_token_ids=SimpleNamespace(shape=(3,)))
    if off:
        observe.mark_target_only(result)
    process = mocker.patch("sglang_spec_ext.target_only.v1.process_decode", return_value="done")
    assert plugin._process_decode("original", "scheduler", "batch", result) == "done"  # type: ignore[arg-type]
    process.assert_called_once_with("original", "scheduler", "batch", result)
    expected = [mocker.call(Mode.TARGET_ONLY, 3, 3)] if off else []
    assert counts.committed.call_args_list == expected


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
    monkeypatch.setattr(plugin.workers, "to_env", lambda arguments: {"KIND": "spec-v1"})
    assert launch(server(settings), launched(CONFIRMED), "KIND")[1] == "spec-v1"
    record = server(None)
    record.speculative_algorithm = None
    assert launch(record, launched({}), "KIND")[1] is None


def test_a_launch_without_a_draft_tells_them_nothing() -> None:
    record = server(None)
    record.speculative_algorithm = None
    assert launch(record, launched({}), args.DRAFTING_WORKER_ENV)[1] is None


def test_a_launch_whose_scheduler_is_silent_fails() -> None:
    with pytest.raises(plugin.NotBoundError, match="scheduler process 0"):
        launch(server(SETTINGS), launched({}))


@pytest.mark.parametrize("before", [None, "", "x"])
def test_the_environment_is_restored_also_after_an_exception(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("A_VARIABLE", raising=False)
    else:
        monkeypatch.setenv("A_VARIABLE", before)
    with pytest.raises(KeyError), plugin._environment({"A_VARIABLE": "y"}):
        assert os.environ["A_VARIABLE"] == "y"
        raise KeyError
    assert os.environ.get("A_VARIABLE") == before


# ---------------------------------------------------------------------------- scheduler hooks


@pytest.mark.usefixtures("api")
def test_the_scheduler_confirms_once_its_step_exists(mocker: MockerFixture) -> None:
    step_of = mocker.patch.object(plugin, "_step_of")
    info = plugin._init_info(lambda scheduler: {"max": 1}, SimpleNamespace(draft_worker="worker"))
    assert info == {"max": 1, observe.CONFIRMATION: True}
    step_of.assert_called_once_with("worker")


@pytest.mark.usefixtures("api")
def test_the_state_is_added_to_what_sglang_tells(mocker: MockerFixture) -> None:
    step = mocker.patch.object(plugin, "_step_of").return_value
    plugin._init_info(lambda scheduler: {}, SimpleNamespace(draft_worker="worker"))
    mocker.patch.object(plugin.RuntimeState, "describe", return_value={"mode": "speculating"})
    mocker.patch.object(plugin, "verify_bound", return_value=["a.target"])
    answer = SimpleNamespace(internal_state={"tp_size": 1})
    assert plugin._get_internal_state(lambda *asked: answer, "scheduler", "request") is answer
    assert answer.internal_state == {
        "tp_size": 1,
        "sglang_spec_ext": {"mode": "speculating", "unbound": ["a.target"]},
    }
    assert plugin._metrics.counts is step.counts


@pytest.mark.usefixtures("api")
def test_a_step_that_cannot_be_built_is_not_confirmed(mocker: MockerFixture) -> None:
    mocker.patch.object(plugin, "_step_of", side_effect=RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        plugin._init_info(lambda scheduler: {}, SimpleNamespace(draft_worker="worker"))


def test_the_first_handshake_is_confirmed_through_its_pipe(mocker: MockerFixture) -> None:
    pipe = mocker.Mock()

    def run(server_args: Any, tp_rank: int, pipe_writer: Any) -> str:
        pipe_writer.send({"status": "ready", "max": tp_rank})
        pipe_writer.close()
        return "ended"

    assert plugin._scheduler_process(run, "arguments", 3, pipe) == "ended"
    pipe.send.assert_called_once_with({"status": "ready", "max": 3, observe.CONFIRMATION: True})
    pipe.close.assert_called_once_with()
    assert plugin._scheduler_process(run, "arguments", tp_rank=3, pipe_writer=pipe) == "ended"


@pytest.mark.usefixtures("api")
def test_the_step_exists_before_the_first_handshake(mocker: MockerFixture) -> None:
    step_of = mocker.patch.object(plugin, "_step_of")
    built = plugin._init_model_worker(lambda scheduler: "built", SimpleNamespace(draft_worker="w"))
    assert built == "built"
    step_of.assert_called_once_with("w")
    assert plugin._metrics.counts is step_of.return_value.counts
    step_of.side_effect = SettingsError("not this target")
    with pytest.raises(SettingsError, match="not this target"):
        plugin._init_model_worker(lambda scheduler: "built", SimpleNamespace(draft_worker="w"))


@pytest.mark.parametrize(("contract", "module"), [(workers.V1, "v1"), (workers.V2, "v2")])
def test_the_step_is_that_of_the_worker_in_use(
    contract: workers.Contract, module: str, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType(f"sglang_spec_ext.target_only.{module}")
    fake.TargetOnlyStep = mocker.Mock(return_value="step")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(plugin, "_worker_settings", SETTINGS)
    monkeypatch.setattr(plugin.workers, "contract", lambda site=None: contract)
    assert plugin._step_of(SimpleNamespace()) == "step"


def test_one_step_per_worker(mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang_spec_ext.target_only.v2")
    made = module.TargetOnlyStep = mocker.Mock(  # type: ignore[attr-defined]
        side_effect=lambda worker, settings: mocker.Mock()
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugin, "_worker_settings", SETTINGS)
    one, two = SimpleNamespace(), SimpleNamespace()
    for worker in (one, two, one):
        plugin._forward_batch_generation("original", worker, "batch", on_publish="p")  # type: ignore[arg-type]
    assert made.call_args_list == [mocker.call(one, SETTINGS), mocker.call(two, SETTINGS)]
    step: Any = getattr(one, plugin._STEP)
    assert step.forward.call_args_list == [mocker.call("original", "batch", on_publish="p")] * 2
