"""How to start SGLang on the test bed. Standard library only.

`environment` is what every process needs, `server_args` are keyword arguments of
``sglang.Engine``, `command_line` starts the same as a server.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.sglang_cpu import patches_v1

_FOLDER = Path(__file__).resolve().parent
TARGET = _FOLDER / "models" / "target"
DRAFT = _FOLDER / "models" / "draft"
EAGLE1 = {
    "speculative_algorithm": "EAGLE",
    "speculative_draft_model_path": str(_FOLDER / "models" / "draft_eagle1"),
}
"""Overrides for `server_args` that take the EAGLE-1 draft instead of the EAGLE-3 one."""
TWO_RANKS = {
    # SGLang wants a NUMA node per rank, or a word about cores; without AMX it binds to none
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    # it tries NCCL wherever it finds the library, and that asks for a GPU
    "SGLANG_NCCL_SO_PATH": "none",
}
"""Variables on top of `environment` for ``tp_size=2``: the ranks then talk over gloo."""
SPECULATIVE_STEPS = 3
DRAFT_TOKENS = {1: 4, 4: 16}
"""Draft tokens per verify, by topk."""


def installed_release() -> str | None:
    """SGLang's version in this environment, None without it."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


FIRST_RELEASE = installed_release() == "0.5.9"
"""No plugin system, and the oldest forms of all that the tests look at."""
SPEC_V1 = installed_release() in patches_v1.RELEASES
"""A release that has the spec-v1 worker, and no speculation of its own on CPU."""
OVERLAP = os.environ.get("SPEC_EXT_TESTBED_SCHEDULE") == "overlap"
"""SGLang's overlap schedule everywhere. With topk 1, 0.5.11 and 0.5.12.post1 take their spec-v2
worker with it; else the test bed has it only where it is asked for."""


def environment(*, overlap: bool = False) -> dict[str, str]:
    """Variables to set in a process before it imports SGLang; its children inherit them.

    overlap: let the overlap scheduler run with speculation, which SGLang turns off on CPU (also
    pass ``disable_overlap_schedule=False``). It needs Triton's interpreter and is slow.
    """
    site = str(_FOLDER / "site")
    inherited = [
        entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != site
    ]
    variables = {
        "PYTHONPATH": os.pathsep.join([site, *filter(None, inherited)]),
        "SGLANG_SPEC_EXT_TESTBED": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        # The models are far too small to gain from threads; several processes only compete.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if overlap:
        variables |= {"SGLANG_SPEC_EXT_TESTBED_OVERLAP": "1", "TRITON_INTERPRET": "1"}
    if SPEC_V1:
        variables["TRITON_INTERPRET"] = "1"
        # it refuses images with the cuDNN that its own torch brings; here nothing uses cuDNN
        variables["SGLANG_DISABLE_CUDNN_CHECK"] = "1"
    return variables


def server_args(topk: int | None, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine`` for the tiny pair.

    topk: None for the target alone, 1 or 4 for EAGLE-3 with 3 steps and 4 or 16 draft tokens.
    overrides, such as `EAGLE1`, replace or add arguments; the value None removes one. Raises
    ValueError for another topk.
    """
    arguments: dict[str, Any] = {
        "model_path": str(TARGET),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native" if SPEC_V1 else "intel_amx",
        "disable_overlap_schedule": not OVERLAP,
        "disable_cuda_graph": True,
        # Of what was free before the weights; the pool is limited below. An engine that boots
        # beside this one may take a part before it looks again.
        "mem_fraction_static": 0.5,
        "max_total_tokens": 16384,
        "max_running_requests": 8,
        "random_seed": 0,
        # An idle scheduler otherwise keeps a core busy, which the next engine needs.
        "sleep_on_idle": True,
        # The target never learnt when to stop writing spaces.
        "constrained_json_disable_any_whitespace": True,
        "log_level": "info",
    }
    if topk is not None:
        if topk not in DRAFT_TOKENS:
            raise ValueError(f"topk must be None, 1 or 4, got {topk!r}")
        arguments |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(DRAFT),
            "speculative_num_steps": SPECULATIVE_STEPS,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": DRAFT_TOKENS[topk],
        }
    arguments |= overrides
    return {name: value for name, value in arguments.items() if value is not None}


def command_line(
    topk: int | None, *, python: str | Sequence[str] = sys.executable, **overrides: Any
) -> list[str]:
    """The server with the arguments of `server_args`, on 127.0.0.1 unless `host` is given."""
    arguments = server_args(topk, **{"host": "127.0.0.1", **overrides})
    interpreter = [python] if isinstance(python, str) else list(python)
    command = [*interpreter, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not False:
            command += [flag, str(value)]
    return command


def process_environment() -> dict[str, str]:
    """All variables of a process that runs SGLang on the test bed: `environment` and the user's.

    The user's SGLang variables (ours included: a plain server must be plain) and proxies (the
    server's warm-up asks itself over HTTP) would change what a test or the demo sees.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SGLANG_") and not name.lower().endswith("_proxy")
    }
    return own | environment()
