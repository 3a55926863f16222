"""Greedy text, acceptance, pool and memory on a GPU, with CUDA graphs and the overlap schedule.

They run on whatever SGLang is installed, and on the worker that the environment selects: up to
0.5.12.post1, SGLANG_ENABLE_SPEC_V2=0 takes spec-v1. SPEC_EXT_GPU_ENGINE holds further arguments of
`sglang.Engine` as JSON, where a box needs some. SGLang stops a server that leaks KV slots as soon
as it idles, as each does between two rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: nothing to ask for a GPU")

from sglang_spec_ext.ops.bench.server import free_port  # noqa: E402
from testbed import prompts  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
MODELS = ROOT / "testbed" / "models"
N, TOKENS, BURST = 4, 300, 12
SWITCHES = 50
GRAPHS_UP_TO = "cuda_graph_max_bs_decode"
MEMORY_GROWTH = 64 * 2**20
"""Other processes of the GPU are in it as well."""


def speculative(draft: Path, topk: int) -> dict[str, Any]:
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": 4 if topk == 1 else 16,
    }


def run(
    target: Path,
    flags: dict[str, Any],
    rounds: int,
    env: dict[str, str] | None = None,
    context: int = prompts.ORDER,
) -> dict[str, Any]:
    engine = {
        "model_path": str(target),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.9,  # of what other tests leave; the pool is limited below
        "max_total_tokens": 60000,
        "max_running_requests": 64,
        GRAPHS_UP_TO: 32,
        "log_level": "info",
        "port": free_port(),
        **flags,
        **json.loads(os.environ.get("SPEC_EXT_GPU_ENGINE", "{}")),
    }
    plan = {"engine": engine, "rounds": rounds, "tokens": TOKENS, "burst": BURST}
    done = subprocess.run(
        [sys.executable, str(HERE / "swinging_load.py"), json.dumps({**plan, "context": context})],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **(env or {})},
        capture_output=True,
        text=True,
        timeout=540,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    log = (done.stdout[:2000] + "\n...\n" + done.stderr)[-8000:]
    assert done.returncode == 0 and lines, log
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def assert_language(result: dict[str, Any]) -> None:
    """The trained target continues its language without a fault, so any other text is ours."""
    for number, requests in enumerate(result["rounds"]):
        for place, request in enumerate(requests):
            expected = prompts.continue_ids(request["prompt"], len(request["output"]))
            assert request["output"] == expected, f"round {number}, request {place}"


def assert_crossed(result: dict[str, Any], switches: int) -> None:
    done = result["plugin"]["switches"]
    assert sum(done.values()) >= switches, done
    assert result["plugin"]["steps"]["target-only"] > 5 * switches
    assert result["plugin"]["mode"] == "speculating", "the last requests run alone"


@cache
def never_off(topk: int, **flags: Any) -> float:
    """Accept length of the long requests on a server with plain speculation."""
    plain = run(MODELS / "target", {**speculative(MODELS / "draft", topk), **flags}, rounds=6)
    assert_language(plain)
    return accept_length(plain)


def accept_length(result: dict[str, Any]) -> float:
    """Over the verifies of the long requests, which saw every switch."""
    long = [request for requests in result["rounds"] for request in requests[:2]]
    verifies = sum(request["verifies"] for request in long)
    return sum(request["accept_length"] * request["verifies"] for request in long) / verifies


@pytest.mark.parametrize("topk", [1, 4])
def test_load_that_swings_across_n(topk: int) -> None:
    flags = {"attention_backend": "triton", "speculative_disable_batch_threshold": N}
    swung = run(MODELS / "target", {**speculative(MODELS / "draft", topk), **flags}, SWITCHES // 2)
    assert_language(swung)
    assert_crossed(swung, SWITCHES)
    assert accept_length(swung) >= 0.98 * never_off(topk, attention_backend="triton")
    assert swung["memory_growth"] < MEMORY_GROWTH


@pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
@pytest.mark.parametrize("topk", [1, 4])
def test_other_attention_backends(backend: str, topk: int, tmp_path: Path) -> None:
    from wide_heads import widen

    for name in ("target", "draft"):
        widen(MODELS / name, tmp_path / name, 128)
    flags = {"attention_backend": backend, "speculative_disable_batch_threshold": N}
    pair = speculative(tmp_path / "draft", topk)
    swung = run(tmp_path / "target", {**pair, **flags}, rounds=8)
    assert_language(swung)
    assert_crossed(swung, 16)
    assert accept_length(swung) >= 0.95 * never_off(topk, attention_backend="triton")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_tensor_parallel_ranks() -> None:
    flags = {"attention_backend": "triton", "speculative_disable_batch_threshold": N, "tp_size": 2}
    swung = run(MODELS / "target", {**speculative(MODELS / "draft", 1), **flags}, rounds=8)
    assert_language(swung)
    assert_crossed(swung, 16)
    assert accept_length(swung) >= 0.95 * never_off(1, attention_backend="triton")


@pytest.mark.parametrize("threshold", [3, 7, 12])
def test_batches_around_every_captured_size_and_above_the_largest(threshold: int) -> None:
    flags = {
        "attention_backend": "triton",
        "speculative_disable_batch_threshold": threshold,
        GRAPHS_UP_TO: 8,
    }
    swung = run(MODELS / "target", {**speculative(MODELS / "draft", 1), **flags}, rounds=4)
    assert_language(swung)
    assert_crossed(swung, 4)
