"""Apply a patch to a module right after its import, without importing it early."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Patch = Callable[[ModuleType], None]


class PatchingFinder(MetaPathFinder):
    """Leaves the modules named in `patches` to the finders behind it to find, and patches them."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        spec = self._find_behind(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            try:
                patch(module)
            except (AttributeError, ValueError) as error:
                raise ImportError(
                    f"the CPU test bed cannot adapt {fullname}: {error}. It is written for SGLang "
                    "0.5.23, 0.5.12.post1, 0.5.10.post1 and 0.5.9; install one of them, or adapt "
                    "testbed/sglang_cpu"
                ) from error

        # On the instance: the module keeps its ordinary loader, so source and tracebacks work.
        spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec

    def _find_behind(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        # the plugin's own finder among them, where SGLang has no plugin system
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def install_finder(patches: Mapping[str, Patch]) -> None:
    """Put a `PatchingFinder` first. Raises RuntimeError if one of the modules is loaded already."""
    if any(isinstance(finder, PatchingFinder) for finder in sys.meta_path):
        return
    late = sorted(set(patches) & set(sys.modules))
    if late:
        raise RuntimeError(f"install the CPU test bed before SGLang is imported; loaded: {late}")
    put_first(PatchingFinder(patches))


def put_first(finder: PatchingFinder) -> None:
    """Let it find modules before all finders but the plugin's, which acts on them as patched."""
    plugins = [i for i, other in enumerate(sys.meta_path) if type(other).__name__ == "Bootstrap"]
    sys.meta_path.insert(plugins[0] + 1 if plugins else 0, finder)
