"""What the server's log says about a level and about a boot, across releases."""

from __future__ import annotations

import pytest

from sglang_spec_ext.ops.bench.diagnosis import first_cause
from sglang_spec_ext.ops.bench.server_log import read_boot, read_level

STAMP = "[2026-05-02 10:00:00] "
PREFILL = (
    STAMP + "Prefill batch, #new-seq: 8, #new-token: 1024, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #queue-req: 0, cuda graph: False, input throughput (token/s): 12.00"
)
SWITCH = (
    STAMP + "spec-ext switch: speculating -> target-only, batch=6, N=4, M=4, steps since last "
    "switch=37"
)
RETRACT = STAMP + (
    "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.5 -> 0.6"
)
ADAPTIVE = STAMP + (
    "Switch adaptive runtime state: steps 3 -> 0, draft_tokens 4 -> 1\n"
    "Adaptive spec params updated: steps 3 -> 0 (ema_accept_len=0.21)"
)


def decode(
    running: int,
    tok_s: float = 100.0,
    *,
    accept: float | None = None,
    graph: str = "cuda graph: True",
    queued: int = 0,
    head: str = STAMP + "Decode batch,",
) -> str:
    speculation = "" if accept is None else f"accept len: {accept:.2f}, accept rate: 0.54, "
    return (
        f"{head} #running-req: {running}, #token: 1108, token usage: 0.00, {speculation}{graph}, "
        f"gen throughput (token/s): {tok_s:.2f}, #queue-req: {queued}"
    )


@pytest.mark.parametrize(
    "line",
    [
        decode(8, 178.86, accept=2.17),
        decode(8, 178.86, accept=2.17, head="[2025-10-22 10:27:56 TP0] Decode batch."),
        decode(8, 178.86, accept=2.17, head="[2026-05-02 10:00:00 DP0 TP0 EP0] Decode batch [17],"),
        decode(8, 178.86, accept=2.17, head="sglang-1  | [TP0] Decode batch,"),
        "Capturing: 100%|####| 4/4\r" + decode(8, 178.86, accept=2.17),
        decode(8, 178.86, accept=2.17) + ", est. decode TFLOPS/s (per GPU): 1.00",
        decode(8, 178.86, accept=2.17).replace("cuda graph", "block accept len: 9.99, cuda graph"),
    ],
)
def test_spellings_of_a_decode_line(line: str) -> None:
    level = read_level(line, 8)
    assert (level.tok_s, level.accept_len, level.graph_backend) == (178.86, 2.17, "cuda")
    assert (level.graph_share, level.running_max, level.queued) == (1.0, 8, 0)


@pytest.mark.parametrize("backend", ["cuda", "cpu", "npu", "musa"])
def test_graph_labels(backend: str) -> None:
    lines = [decode(2, graph=f"{backend} graph: {used}") for used in (True, False, True, True)]
    level = read_level("\n".join(lines), 2)
    assert (level.graph_backend, level.graph_share) == (backend, 0.75)


def test_only_pure_decode_at_the_level_counts() -> None:
    text = "\n".join(
        [
            decode(8, 1),  # window began before the level
            decode(8, 100),
            decode(8, 110),
            PREFILL,
            decode(8, 2),  # prefill in the window
            decode(8, 120),
            decode(7, 3),
            decode(8, 4),  # began with 7
            decode(8, 130),
        ]
    )
    level = read_level(text, 8)
    assert (level.tok_s, level.tok_s_clean, level.tok_s_lines) == (115.0, True, 4)
    assert level.at_level_share == 7 / 8


@pytest.mark.parametrize("event", [PREFILL, SWITCH, RETRACT])
def test_a_window_with_an_event_is_not_pure(event: str) -> None:
    quiet = [decode(4, 100)] * 4
    assert read_level("\n".join([*quiet]), 4).tok_s_clean
    assert not read_level("\n".join([*quiet[:2], event, *quiet[2:]]), 4).tok_s_clean


def test_without_pure_windows_all_lines_near_the_level_count() -> None:
    lines = [line for n in (100, 98, 97, 96) for line in (PREFILL, decode(n, n))]
    level = read_level("\n".join(lines), 100)
    assert (level.tok_s, level.tok_s_clean, level.tok_s_lines) == (97.5, False, 4)
    assert level.at_level_share == 1.0
    assert read_level("\n".join(lines), 102).tok_s_lines == 3  # 97 of 102 is near, 96 is not
    assert read_level(decode(19), 20).tok_s is None  # near means exactly, at small levels


def test_near_the_level_is_not_pure() -> None:
    lines = [decode(100, tok_s) for tok_s in (1, 100, 110, 120)]
    level = read_level("\n".join([*lines, decode(98, 2)]), 100)
    assert (level.tok_s, level.tok_s_clean, level.tok_s_lines) == (110.0, True, 3)


def test_target_only_lines_have_no_accept_length() -> None:
    assert read_level("\n".join([decode(8), decode(8)]), 8).accept_len is None
    mixed = [decode(8, accept=2.0), decode(8), decode(8, accept=4.0)]
    assert read_level("\n".join(mixed), 8).accept_len == 3.0


def test_admission() -> None:
    level = read_level("\n".join([decode(48, queued=16), decode(48, queued=12)]), 64)
    assert (level.running_max, level.queued, level.tok_s) == (48, 16, None)
    assert level.at_level_share == 0.0


def test_events_are_counted() -> None:
    level = read_level("\n".join([SWITCH, RETRACT, SWITCH, ADAPTIVE, ADAPTIVE]), 8)
    assert (level.switches, level.retractions, level.adaptive_switches) == (2, 1, 2)
    assert level.running_max is None


def test_data_parallel_ranks_are_not_mixed_up() -> None:
    lines = [decode(4, head=f"[2026-05-02 10:00:00 DP{rank} TP0] Decode batch,") for rank in (0, 1)]
    level = read_level("\n".join(lines), 8)
    assert level.tok_s is None
    assert level.note is not None and "data-parallel" in level.note


def test_nothing_logged() -> None:
    level = read_level("", 8)
    assert (level.tok_s, level.graph_share, level.at_level_share) == (None, None, None)


def test_boot_costs_across_releases() -> None:
    boot = read_boot(
        "[t] server_args=ServerArgs(speculative_disable_batch_threshold=4)\n"
        "[2026-05-02 10:00:00 TP0] Capture cuda graph end. Time elapsed: 11.35 s. "
        "mem usage=0.50 GB. avail mem=9.00 GB.\n"
        "[2026-05-02 10:00:00 TP1] Capture cuda graph end. Time elapsed: 11.35 s. "
        "mem usage=0.50 GB. avail mem=9.00 GB.\n"
        "[t] Capture draft extend CUDA graph end. elapsed=0.65 s, mem usage=0.25 GB, "
        "avail mem=8.75 GB.\n"
        "[t] spec-ext active: N=4, M=4, K=4, max_running_requests=64, algorithm=EAGLE3\n"
    )
    assert boot.capture_s == pytest.approx(12.0)
    assert boot.capture_gb == pytest.approx(0.75)
    assert boot.plugin_line is not None and boot.plugin_line.startswith("spec-ext active: N=4, M=4")
    assert read_boot("nothing captured") == read_boot("")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            b"usage: launch_server.py [-h]\n"
            b"launch_server.py: error: unrecognized arguments: --speculative-adaptive\n",
            "unrecognized arguments: --speculative-adaptive",
        ),
        (
            b"[2026-05-02 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call "
            b'last):\n  File "x.py", line 1, in f\n    g()\n'
            b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n\n"
            b"[2026-05-02 10:00:01] Received sigquit from a child process. It usually means the "
            b"child failed.\n",
            "CUDA out of memory",
        ),
        (b"one\ntwo --api-key s3cret\n", "one; two --api-key ***"),
        (b"", "empty"),
    ],
)
def test_first_cause(log: bytes, cause: str) -> None:
    assert cause in first_cause(log)
