"""Runs at the start of every Python process that has this folder on PYTHONPATH.

SGLang spawns its scheduler and detokenizer, so the test bed has to reach into new processes; the
environment is the only thing that they inherit.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent


def _run(spec: ModuleSpec | None) -> ModuleType:
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if spec.name not in sys.modules:
        sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _install_test_bed() -> None:
    # Loaded by file, so that nothing else of the checkout becomes importable by accident.
    folder = _HERE.parent / "sglang_cpu"
    package = importlib.util.spec_from_file_location(
        "sglang_cpu", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    _run(package).install()


def _run_shadowed_sitecustomize() -> None:
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    shadowed = PathFinder.find_spec("sitecustomize", others)
    if shadowed is not None:
        _run(shadowed)


if os.environ.get("SGLANG_SPEC_EXT_TESTBED") == "1":
    _install_test_bed()
_run_shadowed_sitecustomize()
