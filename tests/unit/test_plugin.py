"""What the entry point binds in which process, and that a failure to bind is never silent."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from wiring_stand_ins import (
    DOOR,
    DRAFTING_LAUNCHER,
    FLAG,
    LAUNCHER_NAMES,
    LOADING_NAMES,
    SCHEDULER_NAMES,
    SEAM,
    SETTINGS,
    Bindings,
    from_cli,
)

from sglang_spec_ext import args, plugin
from sglang_spec_ext.args import Settings
from sglang_spec_ext.compat import contracts, workers
from sglang_spec_ext.compat.contracts import ARGUMENT_SEAM, SCHEDULER
from sglang_spec_ext.wiring import launcher, scheduler

pytestmark = pytest.mark.usefixtures("bindings")


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
    assert scheduler._settings == SETTINGS
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
    monkeypatch.setattr(workers, "contract", lambda site=None: contract)
    for bound, points in (
        (launcher.table(), contract.launcher),
        (scheduler.table(), contract.scheduler),
    ):
        assert {p.name for p in bound} == {p.name for p in points}
        assert set(bound) <= set(points)
    # a bind is proved by identity: the hook must be the same object each time
    for made in (launcher.table, scheduler.table):
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
    ("contract", "besides"),
    [
        (workers.V1, set()),
        (workers.EARLY_V1, {"draft_positions"}),
        (workers.FIRST_V1, {"draft_positions"}),
    ],
)
def test_with_a_draft_and_no_flag_older_releases_are_mended_and_watched(
    bindings: Bindings,
    monkeypatch: pytest.MonkeyPatch,
    contract: workers.Contract,
    besides: set[str],
    check: str,
    watched: set[str],
) -> None:
    monkeypatch.setattr(workers, "contract", lambda site=None: contract)
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
