"""Diffs of `patches/` that are not applied: when that is said, and what."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from by_path import ROOT, load

from sglang_spec_ext.compat import bootstrap, contracts, diffs, hooks, workers
from sglang_spec_ext.compat.contracts import TouchPoint
from sglang_spec_ext.wiring import launcher
from sglang_spec_ext.wiring.failure import NotBoundError

OURS = EntryPoint("spec_ext", "sglang_spec_ext.plugin:register", "sglang.srt.plugins")
THEIRS = EntryPoint("other", "other:register", "sglang.srt.plugins")


def point(name: str) -> TouchPoint:
    return TouchPoint(name, "sglang.module", name, "function", None, "launcher", "for the test")


class Box:
    """An installation whose seams and doors the test decides."""

    def __init__(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seams: dict[str, bool] = {}
        self.entry_points = [OURS, THEIRS]
        self._site = site
        self._monkeypatch = monkeypatch
        (site / "sglang" / "srt").mkdir(parents=True)
        monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
        monkeypatch.delenv(bootstrap.SWITCH, raising=False)
        monkeypatch.setattr(contracts, "site_dir", lambda: site)
        monkeypatch.setattr(diffs.releases, "installed_version", lambda: "0.5.9")
        monkeypatch.setattr(workers, "hooked", lambda _: tuple(map(point, self.seams)))
        monkeypatch.setattr(contracts, "seamed", lambda p, _: self.seams[p.name])
        monkeypatch.setattr(diffs.entry_point.metadata, "entry_points", self._entry_points)
        self.bootstrap(in_place=False)

    def _entry_points(self, *, group: str) -> EntryPoints:
        return EntryPoints(self.entry_points).select(group=group)

    def with_plugin_system(self) -> None:
        (self._site / "sglang" / "srt" / "plugins").mkdir()

    def bootstrap(self, in_place: bool) -> None:
        found = [f for f in sys.meta_path if not isinstance(f, bootstrap.Bootstrap)]
        ours: list[Any] = [bootstrap.Bootstrap()] if in_place else []
        self._monkeypatch.setattr(sys, "meta_path", [*ours, *found])


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    made = Box(tmp_path, monkeypatch)
    made.seams = {"add_cli_args": True, "init_info": False, "process_decode": False}
    return made


def test_the_concerns_are_those_of_the_sources() -> None:
    found = load("patches/generate.py").load_concerns(ROOT / "patches" / "source")
    assert list(diffs.CONCERNS.items()) == [(c.name, c.seams) for c in found if c.seams]


def test_what_is_missing_is_named_with_the_command_and_why_it_matters(box: Box) -> None:
    (said,) = diffs.missing()
    assert "patches/0.5.9" in said
    assert "not applied: scheduler, results." in said
    assert "our .pth is not in its site-packages" in said
    assert said.endswith("python apply_patches.py apply")


def test_nothing_is_said_where_all_are_applied(box: Box) -> None:
    box.seams = dict.fromkeys(box.seams, True)
    assert diffs.missing() == diffs.missing(patched=True) == []


def test_without_any_seam_only_a_patched_sglang_asks(box: Box) -> None:
    box.seams = dict.fromkeys(box.seams, False)
    assert diffs.missing() == []
    (said,) = diffs.missing(patched=True)
    assert "not applied: server_args, scheduler, results." in said


def test_the_bootstrap_hooks_what_has_no_seam(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.bootstrap(in_place=True)
    assert diffs.missing() == []
    box.with_plugin_system()
    box.entry_points = [THEIRS]  # there the bootstrap does nothing
    assert "there is no entry point spec_ext" in diffs.missing()[0]


def test_so_does_the_entry_point_where_sglang_loads_it(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.with_plugin_system()
    assert diffs.missing() == []
    monkeypatch.setenv("SGLANG_PLUGINS", "other, spec_ext")
    assert diffs.missing() == []
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "(SGLANG_PLUGINS=other)" in diffs.missing()[0]


def test_a_door_that_is_switched_off_is_named(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bootstrap.SWITCH, "0")
    assert f"({bootstrap.SWITCH}=0)" in diffs.missing()[0]


def test_the_launcher_binds_nothing_then(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "check", list)
    monkeypatch.setattr(hooks, "bind", lambda _: pytest.fail("it went on"))
    with pytest.raises(NotBoundError, match="not applied: scheduler, results"):
        launcher.bind()
