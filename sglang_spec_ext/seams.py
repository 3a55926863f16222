"""What the diffs of `patches/` put above functions of SGLang: a place for our hooks.

A diff adds one import and one decorator per function, and nothing else. The first call of such a
function in a process loads the plugin, as SGLang's plugin loader or `compat.bootstrap` would have
done; where one of them has, or where nothing is asked for, the call goes on to the function itself.

Imports neither torch nor SGLang: patched modules import it while they are imported themselves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from sglang_spec_ext.compat import bootstrap

Hook = Callable[..., Any]

_SLOT = "_spec_ext_slot"


class Slot:
    """Where the hooks on one function lie.

    Attributes:
        call: the function, inside its hooks; the last that came is the outermost.
        hooks: in the order in which they came.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.call = original
        self.hooks: list[Hook] = []

    def fill(self, hook: Hook) -> None:
        """Have each call run ``hook(original, *args, **kwargs)``, self or cls first among args."""
        inner = self.call

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return hook(inner, *args, **kwargs)

        self.call = call
        self.hooks.append(hook)


def seam(original: Any) -> Any:
    """Decorator: ``original`` with a slot for hooks. Belongs below staticmethod and classmethod.

    Args:
        original: a function, or a class that is held as an attribute for being called.
    """
    if original.__module__.startswith("sglang."):
        require_all()  # of those who have not applied `package`
    slot = Slot(original)
    if isinstance(original, type):
        return SeamedClass(original, slot)
    module = original.__module__

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        ensure_registered(module)
        return slot.call(*args, **kwargs)

    setattr(wrapper, _SLOT, slot)
    return wrapper


class SeamedClass:
    """A class whose calls go through a slot; all else of it is as it was."""

    def __init__(self, original: type, slot: Slot) -> None:
        self._original = original
        setattr(self, _SLOT, slot)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ensure_registered(self._original.__module__)
        return vars(self)[_SLOT].call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def slot_of(function: Any) -> Slot | None:
    """The slot of a seam, also below the wrappers of others that keep to functools.wraps."""
    found = getattr(function, _SLOT, None)
    return found if isinstance(found, Slot) else None


@functools.cache
def require_all() -> None:
    """Called by a patched SGLang when it is imported: with our flag, every diff must be there.

    One that is missing may be the one that knows the flag, or that would ask the plugin at all.
    Raises ImportError, which stops whoever imports SGLang.
    """
    if bootstrap.spawned() or not bootstrap.threshold_asked_for():
        return
    from sglang_spec_ext.compat import diffs

    for problem in diffs.missing(patched=True):
        raise ImportError(f"{bootstrap.THRESHOLD_FLAG} cannot take effect: {problem}")


_begun: set[str | None] = set()
"""What has been registered in this process: hooks of single modules, or None for all."""


def ensure_registered(module: str) -> None:
    """Load the plugin into this process, if it is one that has a use for it.

    Until a launcher has imported SGLang's engine, only what lies in the seam's own module is bound:
    who just parses arguments must not pay for the engine.
    """
    if None in _begun:
        return
    spawned = bootstrap.spawned()
    if spawned and bootstrap.SCHEDULER not in sys.modules:
        return
    reach = None if spawned or bootstrap.ENGINE in sys.modules else module
    if reach in _begun:
        return
    _begun.add(reach)  # first: what registers may call seams
    try:
        bootstrap.register(reach)
    except BaseException:
        _begun.discard(reach)  # a later call must not go on as if nothing had been asked for
        raise
