"""Whether a hook is seen through the wrappers that SGLang's registry makes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from sglang_spec_ext.compat import hooks
from sglang_spec_ext.compat.contracts import Kind, TouchPoint


def around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """As SGLang's hook registry wraps."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


def point(qualname: str, kind: Kind = "function", module: str = "touched") -> TouchPoint:
    return TouchPoint(qualname, module, qualname, kind, None, "launcher", "for the test")


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("touched")

    class Thing:
        def method(self) -> str:
            return "method"

        @classmethod
        def made(cls) -> str:
            return "made"

        @staticmethod
        def static() -> str:
            return "static"

    module.Thing = Thing  # type: ignore[attr-defined]
    module.function = lambda: "function"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "touched", module)
    return module


def hook(original: Callable[..., Any], *args: Any) -> str:
    return f"hooked {original(*args)}"


def other(original: Callable[..., Any], *args: Any) -> Any:
    return original(*args)


def test_an_untouched_function_is_not_bound(touched: Any) -> None:
    assert not hooks.is_bound(point("function"), hook)


def test_a_wrapped_function_is_bound_to_that_hook_only(touched: Any) -> None:
    touched.function = around(touched.function, hook)
    assert touched.function() == "hooked function"
    assert hooks.is_bound(point("function"), hook)
    assert not hooks.is_bound(point("function"), other)


def test_identity_counts_not_equality(touched: Any) -> None:
    class Owner:
        def hook(self, original: Callable[..., Any]) -> Any:
            return original()

    owner = Owner()
    touched.function = around(touched.function, owner.hook)
    assert owner.hook == owner.hook
    # a bound method is made anew by each access, so the object itself must be kept
    assert not hooks.is_bound(point("function"), owner.hook)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_seen_below_the_hooks_of_other_plugins(touched: Any, depth: int) -> None:
    touched.function = around(touched.function, hook)
    for _ in range(depth):
        touched.function = around(touched.function, other)
    assert hooks.is_bound(point("function"), hook)


def test_seen_above_the_hook_of_another_plugin(touched: Any) -> None:
    touched.function = around(around(touched.function, other), hook)
    assert hooks.is_bound(point("function"), hook)
    assert hooks.is_bound(point("function"), other)


def test_methods_class_methods_and_static_methods(touched: Any) -> None:
    thing = touched.Thing
    thing.method = around(thing.__dict__["method"], hook)
    assert hooks.is_bound(point("Thing.method", "method"), hook)
    assert not hooks.is_bound(point("Thing.made", "classmethod"), hook)
    thing.made = classmethod(around(thing.__dict__["made"].__func__, hook))
    thing.static = staticmethod(around(thing.__dict__["static"].__func__, hook))
    assert hooks.is_bound(point("Thing.made", "classmethod"), hook)
    assert hooks.is_bound(point("Thing.static", "staticmethod"), hook)
    assert (thing().method(), thing.made(), thing.static()) == (
        "hooked method",
        "hooked made",
        "hooked static",
    )


@pytest.mark.parametrize(
    "missing", [point("gone"), point("Thing.gone"), point("function", module="touched_not")]
)
def test_what_is_not_there_is_not_bound(touched: Any, missing: TouchPoint) -> None:
    assert not hooks.is_bound(missing, hook)


# ---------------------------------------------------------------------------- bind


class Registry:
    """Does what SGLang's registry does: to log and go on, and to patch a target only once."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self._pending: dict[str, Callable[..., Any]] = {}
        self._patched: set[str] = set()

    def register(self, target: str, hook: Callable[..., Any], hook_type: str) -> None:
        assert hook_type == "around"
        self.registered.append(target)
        self._pending[target] = hook

    def apply_hooks(self) -> None:
        for target, hook in self._pending.items():
            module, _, name = target.rpartition(".")
            owner: Any = sys.modules.get(module)
            if hasattr(owner, name) and target not in self._patched:
                setattr(owner, name, around(getattr(owner, name), hook))
                self._patched.add(target)
        self._pending.clear()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(hooks, "_applied", set())
    module = ModuleType("sglang.srt.plugins.hook_registry")
    made = Registry()
    module.HookRegistry = made  # type: ignore[attr-defined]
    module.HookType = type("HookType", (), {"AROUND": "around"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_bind_returns_nothing_when_all_is_bound(touched: Any, registry: Registry) -> None:
    assert hooks.bind({point("function"): hook}) == []
    assert touched.function() == "hooked function"


def test_bind_names_what_the_registry_could_not_bind(touched: Any, registry: Registry) -> None:
    assert hooks.bind({point("function"): hook, point("gone"): hook}) == ["touched.gone"]


def test_bind_twice_wraps_once(touched: Any, registry: Registry) -> None:
    hooks.bind({point("function"): hook})
    assert hooks.bind({point("function"): hook}) == []
    assert registry.registered == ["touched.function"]
    assert touched.function() == "hooked function"


def test_a_second_hook_on_what_is_bound_already_binds_too(touched: Any, registry: Registry) -> None:
    hooks.bind({point("function"): hook})
    assert hooks.bind({point("function"): other}) == []
    assert hooks.is_bound(point("function"), hook)
    assert hooks.is_bound(point("function"), other)
    assert touched.function() == "hooked function"


# ---------------------------------------------------------------------------- without a registry


@pytest.fixture
def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release without a plugin system."""
    for name in ("sglang", "sglang.srt"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("no_registry")
def test_without_a_registry_every_kind_is_wrapped(touched: Any) -> None:
    def around_method(original: Callable[..., Any], first: Any, *args: Any) -> str:
        return f"hooked {original(first, *args)}"

    asked = {
        point("function"): hook,
        point("Thing.method", "method"): around_method,
        point("Thing.made", "classmethod"): around_method,
        point("Thing.static", "staticmethod"): hook,
    }
    assert hooks.bind(asked) == []
    thing = touched.Thing()
    assert touched.function() == "hooked function"
    assert thing.method() == "hooked method"
    assert thing.made() == touched.Thing.made() == "hooked made"
    assert thing.static() == touched.Thing.static() == "hooked static"
    assert hooks.bind(asked) == []
    assert touched.function() == "hooked function", "wrapped twice"


@pytest.mark.usefixtures("no_registry")
def test_without_a_registry_an_inherited_method_is_wrapped_in_the_class_that_is_named(
    touched: Any,
) -> None:
    class Derived(touched.Thing):
        pass

    touched.Derived = Derived
    hooks.bind({point("Derived.method", "method"): lambda original, self: "hooked"})
    assert (Derived().method(), touched.Thing().method()) == ("hooked", "method")


@pytest.mark.usefixtures("no_registry")
def test_without_a_registry_what_was_imported_by_name_is_wrapped_too(
    touched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    importer = ModuleType("importer")
    importer.function = touched.function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "importer", importer)
    hooks.bind({point("function"): hook})
    assert importer.function() == "hooked function"


@pytest.mark.usefixtures("no_registry")
def test_without_a_registry_what_is_missing_is_named(touched: Any) -> None:
    missing = [point("gone"), point("Thing.gone"), point("function", module="touched_not")]
    found = hooks.bind({**dict.fromkeys(missing, hook), point("function"): hook})
    assert found == [p.target for p in missing]


def test_a_broken_plugin_system_is_not_taken_for_none(
    touched: Any, no_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name.startswith("sglang.srt.plugins"):
                raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="msgspec"):
        hooks.bind({point("function"): hook})
