"""Greedy text, acceptance, pool and memory on a GPU, with CUDA graphs and the overlap schedule.

They run on whatever SGLang is installed, and on the worker that the environment selects: up to
0.5.12.post1, SGLANG_ENABLE_SPEC_V2=0 takes spec-v1. SPEC_EXT_GPU_ENGINE holds further arguments of
`sglang.Engine` as JSON, where a box needs some. SGLang stops a server that leaks KV slots as soon
as it idles, as each does between two rounds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: nothing to ask for a GPU")

import tiny_mla  # noqa: E402
from wide_heads import widen  # noqa: E402

from sglang_spec_ext.ops.bench.server import free_port  # noqa: E402
from testbed import prompts  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
MODELS = ROOT / "testbed" / "models"
N, TOKENS, BURST = 4, 400, 12
SWITCHES = 50
TIMEOUT_S = 400
ACCEPTED = 3.0
"""Tokens per verify of the tiny pair whose draft is warm; about 1 when it is cold."""

GRAPHS_UP_TO = "cuda_graph_max_bs_decode"
MEMORY_GROWTH = 16 * 2**20


def speculative(draft: Path, topk: int) -> dict[str, Any]:
    return {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(draft),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": 4 if topk == 1 else 16,
    }


def run(target: Path, flags: dict[str, Any], rounds: int, log: Path) -> dict[str, Any]:
    """What `swinging_load` found; the engine's log goes to the file ``log``."""
    result: dict[str, Any] = launch("swinging_load.py", target, flags, load(rounds), log)
    return result


def load(rounds: int) -> dict[str, Any]:
    return {"rounds": rounds, "tokens": TOKENS, "burst": BURST}


def launch(
    program: str, target: Path, flags: dict[str, Any], plan: dict[str, Any], log: Path
) -> Any:
    """What a program beside this one says at its end of an engine that it boots."""
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
    plan_file = log.with_name(f"{log.name}.json")
    plan_file.write_text(json.dumps({"engine": engine, **plan}))
    command = [sys.executable, str(HERE / program), str(plan_file)]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **path}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):  # the engine's processes as well
            os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    assert code == 0 and lines, text[-6000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def assert_language(result: dict[str, Any]) -> None:
    """The trained target continues its language without a fault, so any other text is ours."""
    for number, requests in enumerate(result["rounds"]):
        for place, request in enumerate(requests):
            expected = prompts.continue_ids(request["prompt"], len(request["output"]))
            assert request["output"] == expected, f"round {number}, request {place}"


def assert_crossed(result: dict[str, Any], switches: int) -> None:
    plugin = result["plugin"]
    assert sum(plugin["switches"].values()) >= switches, plugin
    assert plugin["steps"]["target-only"] > 2 * switches, plugin
    assert plugin["mode"] == "speculating", "the last requests run alone"


def accept_length(result: dict[str, Any]) -> float:
    """Over the verifies of the long requests, which saw every switch."""
    long = [request for requests in result["rounds"] for request in requests[:2]]
    verifies = sum(request["verifies"] for request in long)
    return sum(request["accept_length"] * request["verifies"] for request in long) / verifies


TRITON = {"attention_backend": "triton"}
THRESHOLD = {"speculative_disable_batch_threshold": N}


@pytest.mark.parametrize("topk", [1, 4])
def test_load_that_swings_across_n(topk: int, tmp_path: Path) -> None:
    """With a draft that needs its history, against a server that never stops to speculate."""
    pair = {**speculative(MODELS / "draft", topk), **TRITON}
    swung = run(MODELS / "target", {**pair, **THRESHOLD}, SWITCHES // 4 + 1, tmp_path / "log")
    assert_language(swung)
    assert_crossed(swung, SWITCHES)
    assert swung["memory_growth"] < MEMORY_GROWTH
    never_off = run(MODELS / "target", pair, 6, tmp_path / "log_never_off")
    assert_language(never_off)
    assert accept_length(swung) >= 0.98 * accept_length(never_off)


@pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
@pytest.mark.parametrize("topk", [1, 4])
def test_other_attention_backends(backend: str, topk: int, tmp_path: Path) -> None:
    for name in ("target", "draft"):
        widen(MODELS / name, tmp_path / name, 128)
    flags = {**speculative(tmp_path / "draft", topk), "attention_backend": backend, **THRESHOLD}
    swung = run(tmp_path / "target", flags, 5, tmp_path / "log")
    assert_language(swung)
    assert_crossed(swung, 20)
    assert accept_length(swung) > ACCEPTED


@pytest.mark.parametrize("threshold", [3, 7, 12])
def test_batches_around_every_captured_size_and_above_the_largest(
    threshold: int, tmp_path: Path
) -> None:
    sizes = {"speculative_disable_batch_threshold": threshold, GRAPHS_UP_TO: 8}
    pair = {**speculative(MODELS / "draft", 1), **TRITON}
    swung = run(MODELS / "target", {**pair, **sizes}, 4, tmp_path / "log")
    assert_language(swung)
    assert_crossed(swung, 16)
    assert accept_length(swung) > ACCEPTED


@pytest.mark.parametrize(
    ("backend", "topk"),
    [("triton", 1), ("triton", 4), ("fa3", 1), ("fa3", 4), ("flashinfer", 1), ("flashmla", 1)],
)
def test_a_target_with_latent_attention(backend: str, topk: int, tmp_path: Path) -> None:
    """Nothing is trained and bfloat16 has near ties, so the text of two servers differs. But to the
    target, reading all of a text at once, each of its tokens is the best one, or nearly: as often
    as in its own text, and nowhere by as much as a second best one commonly falls short. (The worst
    token of either text is one or two steps of bfloat16 from the best, so these do not compare.)"""
    tiny_mla.write(tmp_path)
    target, attention = tmp_path / "target", {"attention_backend": backend}
    flags = {**speculative(tmp_path / "draft", topk), **attention, **THRESHOLD}
    if backend == "flashmla":  # the draft's attention is an ordinary one
        flags["speculative_draft_attention_backend"] = "triton"
    swung = run(target, flags, 4, tmp_path / "log")
    assert_crossed(swung, 16)
    texts = [(one["prompt"], one["output"]) for requests in swung["rounds"] for one in requests]
    plan = load(4) | {"texts": texts}
    read = launch("scoring.py", target, attention, plan, tmp_path / "log_read")
    assert len(read["given"]) == len(read["own"]) > 5000
    assert max(read["given"]) < median(read["second"])
    assert sum(read["given"]) < 2 * sum(read["own"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_tensor_parallel_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {**speculative(MODELS / "draft", 1), **TRITON, "tp_size": 2}
    # the other tests may hold memory of one of the two
    monkeypatch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
    swung = run(MODELS / "target", {**pair, **THRESHOLD}, 5, tmp_path / "log")
    assert_language(swung)
    assert_crossed(swung, 20)
    assert accept_length(swung) > ACCEPTED
