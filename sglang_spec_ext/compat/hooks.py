"""Bind hooks to touch points, and prove that they are bound.

Where the diffs of `patches/` are applied, a touch point has a seam, and the hook goes into its
slot. Elsewhere SGLang's own registry binds it, where there is one. It logs what fails and goes on;
that is why every bind here is checked afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sglang_spec_ext import seams
from sglang_spec_ext.compat.contracts import TouchPoint

Hook = Callable[..., Any]
Table = dict[TouchPoint, Hook]


def within(hooks: Mapping[TouchPoint, Hook], module: str | None) -> Table:
    """The hooks on touch points in ``module``; all where it is None."""
    return {point: hook for point, hook in hooks.items() if module in (None, point.module)}


def bind(hooks: Mapping[TouchPoint, Hook]) -> list[str]:
    """Wrap each touch point by its hook (AROUND); returns the targets that did not bind.

    A hook is called as ``hook(original, *args, **kwargs)``, self or cls first among the args. Safe
    to call twice.
    """
    missing = {p: h for p, h in hooks.items() if not is_bound(p, h) and not _fill(p, h)}
    if not missing:
        return []
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ModuleNotFoundError as error:
        if error.name not in ("sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
            raise
        for point, hook in missing.items():
            with contextlib.suppress(ImportError, AttributeError):  # reported as unbound
                _wrap(point, hook)
        return unbound(hooks)
    for point, hook in missing.items():
        if point.target in _applied:
            _wrap(point, hook)
        else:
            HookRegistry.register(point.target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    _applied.update(point.target for point, hook in missing.items() if is_bound(point, hook))
    return unbound(hooks)


# What the registry has patched once it leaves alone ever after: a second hook comes to nothing.
_applied: set[str] = set()


def _fill(point: TouchPoint, hook: Hook) -> bool:
    """Put the hook into the touch point's slot, if it has one."""
    try:
        found = _resolve(point)
    except (ImportError, AttributeError):
        return False
    slot = seams.slot_of(found)
    if slot is None and point.kind == "attribute":
        # of what is no function the registry wraps nothing, so it gets a seam here
        path, _, name = point.qualname.rpartition(".")
        seamed = seams.seam(found)
        setattr(pkgutil.resolve_name(f"{point.module}:{path}"), name, seamed)
        slot = seams.slot_of(seamed)
    if slot is None:
        return False
    slot.fill(hook)
    return True


def _resolve(point: TouchPoint) -> Any:
    return pkgutil.resolve_name(f"{point.module}:{point.qualname}")


def _wrap(point: TouchPoint, hook: Hook) -> None:
    """What SGLang's registry does for an AROUND hook, for releases that have none."""
    path, _, name = point.qualname.rpartition(".")
    owner = pkgutil.resolve_name(f"{point.module}:{path}")
    original = getattr(owner, name)
    raw = vars(owner).get(name)
    if isinstance(raw, classmethod | staticmethod):
        original = raw.__func__

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    if isinstance(raw, classmethod | staticmethod):
        setattr(owner, name, type(raw)(wrapper))
        return
    setattr(owner, name, wrapper)
    if not path:
        _replace_copies(name, original, wrapper)


def _replace_copies(name: str, original: Any, wrapper: Any) -> None:
    # `from module import name` has copied the reference into what is imported already
    for module in list(sys.modules.values()):
        if vars(module).get(name) is original:
            setattr(module, name, wrapper)


def unbound(hooks: Mapping[TouchPoint, Hook]) -> list[str]:
    """Targets among these whose hook does not run in this process."""
    return [point.target for point, hook in hooks.items() if not is_bound(point, hook)]


def is_bound(point: TouchPoint, hook: Hook) -> bool:
    """Whether calling the touch point in this process runs ``hook``."""
    try:
        function = _resolve(point)
    except (ImportError, AttributeError):
        return False
    slot = seams.slot_of(function)
    layers = [*(slot.hooks if slot else ()), *_layers(function)]
    return any(layer is hook for layer in layers)


def _layers(function: Any) -> Iterator[Any]:
    # SGLang's wrapper keeps the hook in its closure and the wrapped function in __wrapped__
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell may still be empty
                yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)
