"""Bind hooks to touch points through SGLang's own registry, and prove that they are bound.

The registry logs what fails and goes on; that is why every bind here is checked afterwards.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sglang_spec_ext.compat.contracts import TouchPoint

Hook = Callable[..., Any]


def bind(hooks: Mapping[TouchPoint, Hook]) -> list[str]:
    """Wrap each touch point by its hook (AROUND); returns the targets that did not bind.

    A hook is called as ``hook(original, *args, **kwargs)``, self or cls first among the args. Safe
    to call twice.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for point, hook in hooks.items():
        if not is_bound(point, hook):
            HookRegistry.register(point.target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()
    return unbound(hooks)


def unbound(hooks: Mapping[TouchPoint, Hook]) -> list[str]:
    """Targets among these whose hook does not run in this process."""
    return [point.target for point, hook in hooks.items() if not is_bound(point, hook)]


def is_bound(point: TouchPoint, hook: Hook) -> bool:
    """Whether calling the touch point in this process runs ``hook``."""
    try:
        function = pkgutil.resolve_name(f"{point.module}:{point.qualname}")
    except (ImportError, AttributeError):
        return False
    return any(layer is hook for layer in _layers(function))


def _layers(function: Any) -> Iterator[Any]:
    # SGLang's wrapper keeps the hook in its closure and the wrapped function in __wrapped__
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell may still be empty
                yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)
