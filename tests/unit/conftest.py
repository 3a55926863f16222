"""Fixtures of the tests of `plugin`, `wiring` and `benchmarks`, and an HTTP server."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from by_path import ROOT
from http_answers import Serve, serving
from wiring_stand_ins import Bindings, FakeAPI

from sglang_spec_ext import args, plugin
from sglang_spec_ext.compat import contracts, hooks, workers
from sglang_spec_ext.wiring import scheduler
from sglang_spec_ext.wiring.asked import asked


@pytest.fixture
def serve() -> Iterator[Serve]:
    with serving() as start:
        yield start


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Programs of `benchmarks/` by name; they import one another, as when one is run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def switch_cost(program: Callable[[str], ModuleType]) -> ModuleType:
    return program("switch_cost")


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    """A process in which nothing has been asked for or bound, on the spec-v2 worker."""
    made = Bindings()
    monkeypatch.setattr(hooks, "bind", made.bind)
    monkeypatch.setattr(hooks, "is_bound", made.is_bound)
    monkeypatch.setattr(contracts, "check", made.check)
    monkeypatch.setattr(workers, "contract", lambda site=None: workers.V2)
    monkeypatch.setattr(asked, "on_command_line", False)
    monkeypatch.setattr(asked, "draft_check", None)
    monkeypatch.setattr(scheduler, "_settings", None)
    monkeypatch.setattr(scheduler, "_runtime_state", None)
    monkeypatch.setattr(scheduler._metrics, "counts", None)
    ours = (args.WORKER_ENV, args.DRAFTING_WORKER_ENV, args.HOOKS_ENV, args.CHECK_ENV)
    for name in (*ours, *args.ENV_NAMES.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, plugin._SCHEDULER_MODULE, raising=False)
    return made


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_spec_ext import compat

    name = "sglang_spec_ext.compat.sglang_api"
    module = FakeAPI(name)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(compat, "sglang_api", module, raising=False)


@pytest.fixture
def sglang_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.99")
