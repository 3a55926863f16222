"""Load the plugin into an SGLang that has no plugin system of its own.

`sglang_spec_ext_bootstrap.pth` runs `install` at every start of the interpreter, also in each
process that SGLang spawns. So this module imports nothing but what every interpreter has loaded
by then, and `install` only puts a finder in front of the import system. A process that imports
none of `TRIGGERS` sees no more of it than one look-up per import; where SGLang has a plugin
system, that is all that the finder does.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the milliseconds of importing typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SWITCH = "SGLANG_SPEC_EXT_BOOTSTRAP"
"""Set to 0 to switch the bootstrap off."""

_PREFIX = "SGLANG_SPEC_EXT_"
_DOOR = "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD"
# what the launcher leaves for the processes that it spawns
_SPAWNED = ("SGLANG_SPEC_EXT_WORKER", "SGLANG_SPEC_EXT_DRAFTING_WORKER")
THRESHOLD_FLAG = "--speculative-disable-batch-threshold"
_FLAGS = (
    THRESHOLD_FLAG,
    "--speculative-resume-batch-threshold",
    "--speculative-min-steps-between-switches",
)

SERVER_ARGS = "sglang.srt.server_args"
ENGINE = "sglang.srt.entrypoints.engine"
SCHEDULER = "sglang.srt.managers.scheduler"
TRIGGERS = (SERVER_ARGS, ENGINE, SCHEDULER)
"""Modules after whose import there is something to bind.

The argument seam lies in the first, which has nothing of SGLang's engine loaded yet and may be
imported from within anything: only what lies in it can be bound then. All else in a launcher lies
in the second and what it imports. A spawned scheduler process binds after the third, before its
worker is built.
"""


class Bootstrap:
    """A finder that leaves the finding to those behind it, and registers after the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in TRIGGERS or _has_plugin_system():
            return None
        spec = _find_behind(self, name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_after(name)

        # on the instance: the module keeps its ordinary loader, so source and tracebacks work
        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Put the finder in place, once, unless it is switched off."""
    if os.environ.get(SWITCH) == "0":
        if os.environ.get(_DOOR):
            _say(
                f"{_DOOR} is set and {SWITCH}=0 too; without a plugin system and without the diffs "
                "of patches/ it has no effect"
            )
        return
    if not installed():
        sys.meta_path.insert(0, Bootstrap())


def installed() -> bool:
    """Whether the finder is in place in this process."""
    return any(isinstance(finder, Bootstrap) for finder in sys.meta_path)


def _has_plugin_system() -> bool:
    # the parents of a module are imported before it is looked for
    folders = sys.modules["sglang.srt"].__path__
    return any(os.path.isdir(os.path.join(folder, "plugins")) for folder in folders)


def _find_behind(
    finder: Bootstrap, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    # not importlib's own PathFinder: an editable SGLang is found by a finder of its own
    for other in sys.meta_path[sys.meta_path.index(finder) + 1 :]:
        spec = other.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _register_after(executed: str) -> None:
    if spawned() is (executed == SCHEDULER):
        register(SERVER_ARGS if executed == SERVER_ARGS else None)


def spawned() -> bool:
    """Whether a launcher of ours has spawned this process, or one that spawned it."""
    return any(name in os.environ for name in _SPAWNED)


def register(only_in: str | None) -> None:
    """Load the plugin; what it raises gets out if anything of ours was asked for.

    Args:
        only_in: as `plugin.register` has it.
    """
    try:
        from sglang_spec_ext import plugin

        plugin.register(only_in=only_in)
    except Exception as error:
        if _asked_for():
            raise
        # nobody asked for anything of ours: that must not cost them their server
        _say(f"not loaded, SGLang runs without it: {error!r}")


def _asked_for() -> bool:
    return any(name.startswith(_PREFIX) and name != SWITCH for name in os.environ) or any(
        argument.startswith(_FLAGS) for argument in sys.argv
    )


def threshold_asked_for() -> bool:
    """Whether this process was started with the threshold, by flag or by variable."""
    return bool(os.environ.get(_DOOR)) or any(
        argument.startswith(THRESHOLD_FLAG) for argument in sys.argv
    )


def _say(message: str) -> None:
    print(f"sglang_spec_ext: {message}", file=sys.stderr)
