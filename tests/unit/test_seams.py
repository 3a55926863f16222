"""Seams, as the diffs of `patches/` put them into SGLang: what calls do, who registers, when."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_spec_ext import args, plugin, seams
from sglang_spec_ext.compat import bootstrap, diffs, hooks
from sglang_spec_ext.compat.contracts import Kind, TouchPoint
from sglang_spec_ext.seams import seam

MODULE = "patched_sglang"
SOURCE = """
from sglang_spec_ext.seams import seam

@seam
def function(first, *, word="plain"):
    "What it says."
    return [first, word]

@seam
async def later(first):
    return [first, "later"]

class Record:
    shared = "shared"
    def __init__(self, **kwargs):
        self.kwargs = kwargs

class Thing:
    record_class: Record = seam(Record)
    plain_class: Record = Record

    @seam
    def method(self, first):
        return [type(self).__name__, first]

    @classmethod
    @seam
    def made(cls, first):
        return [cls.__name__, first]

    @staticmethod
    @seam
    def static(first):
        return ["static", first]

    def plain(self, first):
        return ["plain", first]

    def make(self, **kwargs):
        return self.record_class(**kwargs)

class Derived(Thing):
    pass
"""


class Registering:
    """Stands for `plugin.register`: remembers its calls, and does what it is told to."""

    def __init__(self) -> None:
        self.calls: list[str | None] = []
        self.act: Callable[[], Any] = lambda: None

    def __call__(self, only_in: str | None = None) -> None:
        self.calls.append(only_in)
        self.act()


@pytest.fixture(autouse=True)
def registering(monkeypatch: pytest.MonkeyPatch) -> Registering:
    made = Registering()
    monkeypatch.setattr(plugin, "register", made)
    monkeypatch.setattr(seams, "_begun", set())
    seams.require_all.cache_clear()
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    for name in [name for name in os.environ if name.startswith("SGLANG_SPEC_EXT_")]:
        monkeypatch.delenv(name)
    for name in bootstrap.TRIGGERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return made


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    exec(SOURCE, vars(module))
    return module


def point(qualname: str, kind: Kind = "function") -> TouchPoint:
    return TouchPoint(qualname, MODULE, qualname, kind, None, "launcher", "for the test")


POINTS = {
    "function": point("function"),
    "method": point("Thing.method", "method"),
    "made": point("Thing.made", "classmethod"),
    "static": point("Thing.static", "staticmethod"),
    "record_class": point("Thing.record_class", "attribute"),
}
PLAIN = point("Thing.plain", "method")


def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ["hooked", original(*args, **kwargs)]


def other(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return ["other", original(*args, **kwargs)]


def results(patched: Any) -> dict[str, Any]:
    def kwargs_of(found: Any) -> Any:
        return [found[0], found[1].kwargs] if isinstance(found, list) else found.kwargs

    thing = patched.Derived()
    return {
        "function": patched.function(1, word="given"),
        "method": thing.method(1),
        "made": patched.Derived.made(1),
        "static": thing.static(1),
        "record_class": kwargs_of(thing.make(a=1)),
    }


UNHOOKED = {
    "function": [1, "given"],
    "method": ["Derived", 1],
    "made": ["Derived", 1],
    "static": ["static", 1],
    "record_class": {"a": 1},
}

# ------------------------------------------------------------------------------ without hooks


def test_without_hooks_calls_are_what_they_were(patched: Any) -> None:
    assert results(patched) == UNHOOKED
    assert asyncio.run(patched.later(1)) == [1, "later"]


def test_name_signature_and_words_are_kept(patched: Any) -> None:
    assert str(inspect.signature(patched.function)) == "(first, *, word='plain')"
    assert patched.function.__doc__ == "What it says."
    assert str(inspect.signature(patched.Thing().method)) == "(first)"
    assert str(inspect.signature(patched.Thing.made)) == "(first)"


def test_a_function_travels_to_a_spawned_process(patched: Any) -> None:
    """By its name: SGLang hands its processes' main functions over."""
    assert pickle.loads(pickle.dumps(patched.function)) is patched.function


def test_a_class_in_a_seam_is_otherwise_itself(patched: Any) -> None:
    assert patched.Thing.record_class.shared == "shared"
    assert isinstance(patched.Thing().make(), patched.Record)
    with pytest.raises(AttributeError, match="nothing"):
        patched.Thing.record_class.nothing  # noqa: B018


# ------------------------------------------------------------------------------ binding


@pytest.mark.parametrize("name", POINTS)
def test_a_hook_is_bound_once_and_to_this_seam_only(patched: Any, name: str) -> None:
    asked = {POINTS[name]: hook}
    assert hooks.unbound(asked) == [POINTS[name].target]
    assert hooks.bind(asked) == []
    assert hooks.bind(asked) == []
    assert not hooks.is_bound(POINTS[name], other)
    assert results(patched) == {**UNHOOKED, name: ["hooked", UNHOOKED[name]]}


def test_two_hooks_on_one_seam(patched: Any) -> None:
    signatures = []

    def outermost(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        signatures.append(str(inspect.signature(original)))
        return original(*args, **kwargs)

    for each in (hook, other, outermost):
        assert hooks.bind({POINTS["function"]: each}) == []
    assert patched.function(1) == ["other", ["hooked", [1, "plain"]]]
    assert signatures == ["(first, *, word='plain')"]
    assert hooks.is_bound(POINTS["function"], hook)
    assert hooks.is_bound(POINTS["function"], other)


class Registry:
    """SGLang's hook registry, for what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def register(self, target: str, hook: Any, hook_type: Any) -> None:
        self.asked.append(target)

    def apply_hooks(self) -> None:
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    module = ModuleType("sglang.srt.plugins.hook_registry")
    vars(module).update(HookRegistry=made, HookType=type("HookType", (), {"AROUND": 1}))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_sglangs_registry_gets_what_has_no_seam_and_nothing_else(
    patched: Any, registry: Registry
) -> None:
    before = dict(vars(patched.Thing))
    missing = hooks.bind({**dict.fromkeys(POINTS.values(), hook), PLAIN: hook})
    assert registry.asked == missing == [PLAIN.target]
    assert dict(vars(patched.Thing)) == before, "a seam was replaced"


def test_a_class_attribute_without_a_seam_gets_one(patched: Any, registry: Registry) -> None:
    asked = {point("Thing.plain_class", "attribute"): hook}
    assert hooks.bind(asked) == hooks.bind(asked) == []
    name, record = patched.Thing().plain_class(a=1)
    assert (name, record.kwargs, registry.asked) == ("hooked", {"a": 1}, [])


def test_a_seam_is_seen_below_the_hook_of_another_plugin(patched: Any) -> None:
    seamed = patched.Thing.method

    @functools.wraps(seamed)
    def around(self: Any, *args: Any) -> Any:
        return ["theirs", seamed(self, *args)]

    patched.Thing.method = around
    assert hooks.bind({POINTS["method"]: hook}) == []
    assert patched.Thing().method(1) == ["theirs", ["hooked", ["Thing", 1]]]


# ------------------------------------------------------------------------------ registering


def loaded(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def test_importing_a_patched_module_registers_nothing(
    patched: Any, registering: Registering
) -> None:
    assert registering.calls == []


def test_a_launcher_registers_before_and_after_its_engine_is_there(
    patched: Any, registering: Registering, monkeypatch: pytest.MonkeyPatch
) -> None:
    results(patched)
    assert registering.calls == [MODULE]
    loaded(monkeypatch, bootstrap.ENGINE)
    results(patched)
    assert registering.calls == [MODULE, None]


@pytest.mark.parametrize("name", POINTS)
def test_the_first_call_already_goes_through_the_hook(
    patched: Any, registering: Registering, name: str
) -> None:
    registering.act = lambda: hooks.bind({POINTS[name]: hook})
    calls = {
        "function": lambda: patched.function(1),
        "method": lambda: patched.Thing().method(1),
        "made": lambda: patched.Thing.made(1),
        "static": lambda: patched.Thing.static(1),
        "record_class": lambda: patched.Thing().make(),
    }
    assert calls[name]()[0] == "hooked"


def test_registering_may_call_seams(patched: Any, registering: Registering) -> None:
    registering.act = lambda: patched.function(2)
    assert patched.function(1) == [1, "plain"]
    assert registering.calls == [MODULE]


@pytest.mark.parametrize("left", [args.WORKER_ENV, args.DRAFTING_WORKER_ENV])
def test_a_spawned_process_registers_once_it_is_a_scheduler(
    patched: Any, registering: Registering, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setenv(left, "{}")
    results(patched)
    assert registering.calls == []
    loaded(monkeypatch, bootstrap.SCHEDULER)  # which need not have the engine
    results(patched)
    assert registering.calls == [None]


def break_plugin() -> None:
    raise RuntimeError("the plugin is broken")


def test_with_our_flag_every_call_says_what_is_broken(
    patched: Any, registering: Registering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server", f"{args.THRESHOLD_FLAG}=4"])
    registering.act = break_plugin
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the plugin is broken"):
            patched.function(1)


def test_without_it_a_broken_plugin_costs_nobody_a_server(
    patched: Any,
    registering: Registering,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(bootstrap.SWITCH, "0")  # asks for nothing of ours
    registering.act = break_plugin
    assert results(patched) == UNHOOKED
    assert capsys.readouterr().err.count("not loaded, SGLang runs without it") == 1


def test_what_stops_a_process_gets_out(patched: Any, registering: Registering) -> None:
    def stop() -> None:
        raise SystemExit("sglang_spec_ext: error: not bound")

    registering.act = stop
    for _ in range(2):
        with pytest.raises(SystemExit):
            patched.function(1)


# ------------------------------------------------------------------------------ diffs missing


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said = ["the diff scheduler is not applied"]
    monkeypatch.setattr(diffs, "missing", lambda patched: said if patched else [])
    return said


def test_without_our_flag_diffs_may_be_missing(missing: list[str]) -> None:
    seams.require_all()


def patched_module(source: str) -> Any:
    module = ModuleType("sglang.patched")
    exec(f"from sglang_spec_ext.seams import seam\n{source}", vars(module))
    return module


@pytest.mark.parametrize("asked", ["flag", "variable"])
def test_with_our_flag_none_may(
    missing: list[str], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    if asked == "flag":
        monkeypatch.setattr(sys, "argv", ["launch_server", args.THRESHOLD_FLAG, "4"])
    else:
        monkeypatch.setenv(args.ENV_NAMES["threshold"], "4")
    for _ in range(2):
        with pytest.raises(ImportError, match=f"{args.THRESHOLD_FLAG}.*the diff scheduler"):
            seams.require_all()
    with pytest.raises(ImportError, match="the diff scheduler"):
        patched_module("@seam\ndef function(): pass")
    missing.clear()
    patched_module("@seam\ndef function(): pass")


def test_a_spawned_process_leaves_it_to_its_launcher(
    missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(args.ENV_NAMES["threshold"], "4")
    monkeypatch.setenv(args.WORKER_ENV, "{}")
    seams.require_all()


def test_it_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sglang_spec_ext.seams; "
        "print([n for n in sys.modules if n.split('.')[0] in ('torch', 'sglang')])"
    )
    path = {"PYTHONPATH": str(Path(seams.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=path, check=True
    )
    assert done.stdout == "[]\n"


def test_a_decorated_function_is_a_seam() -> None:
    assert seams.slot_of(seam(break_plugin)) is not None
    assert seams.slot_of(break_plugin) is None
