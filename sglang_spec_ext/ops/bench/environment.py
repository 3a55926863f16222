"""What the figures depend on: versions, GPUs, SGLANG_* variables. Missing tools give no entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_spec_ext import __version__
from sglang_spec_ext.ops import nvidia
from sglang_spec_ext.ops.address import is_here
from sglang_spec_ext.ops.bench.variants import recorded_environment

# Distribution metadata only: importing torch would take seconds and touch the GPU.
_VERSIONS = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("sglang", "torch", "sglang-kernel", "sgl-kernel", "flashinfer-python", "triton"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def describe_machine(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """For a server that ``command`` starts here; versions as its own Python sees them."""
    is_python = Path(command[0]).name.startswith("python")
    python = command[0] if is_python else sys.executable
    return {
        "sglang_spec_ext": __version__,
        **_versions(python, environ),
        "gpus": gpus(environ.get("CUDA_VISIBLE_DEVICES")),
        "cpus": os.cpu_count(),
        "variables": recorded_environment(environ),
    }


def describe_server(url: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """For a server that somebody else runs: what it tells, and our GPUs if it runs here."""
    return {
        "sglang_spec_ext": __version__,
        "sglang": info.get("version"),
        "gpus": gpus() if is_here(url) else None,
    }


def gpus(visible: str | None = None) -> list[dict[str, str]]:
    """All, or those that CUDA_VISIBLE_DEVICES leaves ``visible``."""
    names = ("name", "driver_version", "memory.total")
    rows = nvidia.ask(f"--query-gpu={','.join(names)}", only=visible)
    return [dict(zip(("name", "driver", "memory_mib"), row, strict=True)) for row in rows]


def gpu_memory_used_mib() -> list[int] | None:
    """Per GPU, whoever uses it; None without NVIDIA GPUs."""
    used = [int(row[0]) for row in nvidia.ask("--query-gpu=memory.used") if row[0].isdigit()]
    return used or None


def _versions(python: str, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        versions: dict[str, str] = json.loads(_output([python, "-c", _VERSIONS], environ) or "{}")
    except ValueError:
        return {}
    return versions


def _output(command: Sequence[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
