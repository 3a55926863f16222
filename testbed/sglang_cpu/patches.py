"""What SGLang 0.5.23 needs changed to run on such a machine, by module.

A release that differs has a table of its own, beside this file; `install()` chooses.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from .import_hooks import Patch

OVERLAP_ENV = "SGLANG_SPEC_EXT_TESTBED_OVERLAP"


def use_stand_in_kernels(load_utils: ModuleType) -> None:
    """The wheel on PyPI is the CUDA build: its library does not load here and has no CPU ops."""

    def load_architecture_specific_ops() -> ModuleType:
        from . import kernels

        kernels.register()
        return ModuleType("common_ops")

    replace(load_utils, "_load_architecture_specific_ops", load_architecture_specific_ops)
    replace(load_utils, "_preload_cuda_library", lambda: None)


def _keep_intel_amx_backend(overrides: ModuleType) -> None:
    """SGLang drops this backend on a CPU without AMX; its two attention kernels are stand-ins here.

    Only the choice of the backend changes: everything else keeps asking for AMX and, finding none,
    uses SGLang's own native PyTorch code.
    """
    name = "_attention_backend_platform_fallbacks"
    original = getattr(overrides, name)

    def attention_backend_platform_fallbacks(view: Any) -> dict[str, Any]:
        return {} if view.attention_backend == "intel_amx" else original(view)

    place = overrides.POST_PROCESS_PASSES.index(original)
    overrides.POST_PROCESS_PASSES[place] = attention_backend_platform_fallbacks
    replace(overrides, name, attention_backend_platform_fallbacks)


def _allow_overlap(speculative_hook: ModuleType) -> None:
    """SGLang turns the overlap scheduler off for speculation on CPU; its logic can run here."""
    if os.environ.get(OVERLAP_ENV) == "1":
        replace(speculative_hook, "_disable_overlap_schedule_for_cpu", lambda server_args: None)


def replace(owner: Any, name: str, value: object) -> None:
    """Set an attribute that is there."""
    getattr(owner, name)  # a name that is gone must not be "replaced" without effect
    setattr(owner, name, value)


PATCHES: dict[str, Patch] = {
    "sgl_kernel.load_utils": use_stand_in_kernels,
    "sglang.srt.arg_groups.overrides": _keep_intel_amx_backend,
    "sglang.srt.arg_groups.speculative_hook": _allow_overlap,
}
