"""Lets SGLang's real engine run on a CPU without CUDA and without AMX. For tests and demos only.

`install()` patches nothing itself: it arranges that each patch of `patches.py` is applied right
after the SGLang module that it concerns has been imported.
"""

from __future__ import annotations

import importlib.metadata

from . import patches, patches_v1
from .import_hooks import install_finder

__all__ = ["install"]


def install() -> None:
    """Activate the test bed in this process; call it before SGLang is imported. Idempotent.

    Raises RuntimeError when a module to be patched has been imported already.
    """
    older = importlib.metadata.version("sglang") in patches_v1.RELEASES
    install_finder(patches_v1.PATCHES if older else patches.PATCHES)
