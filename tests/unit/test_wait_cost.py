"""The reader takes a fast way through a log: it must find what reading every line would find, and
must not be lost without anybody noticing. No clock here: what is counted is the work.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from wait_logs import (
    CLOSED,
    FLOOD,
    HANDLED,
    NCCL,
    NINJA,
    READY,
    SIGQUIT,
    UNRECOGNIZED,
    USER_WARNING,
    WATCHDOG,
    LogWriter,
    boot_new,
    boot_old,
    new_args,
)

from sglang_spec_ext.ops.wait import patterns, reader
from sglang_spec_ext.ops.wait.boot import BootState
from sglang_spec_ext.ops.wait.patterns import ANCHORS, PATTERNS, Kind, LinePattern, classify
from sglang_spec_ext.ops.wait.reader import BLOCK, MAX_IN_A_ROW, SAMPLE, Growth, LogReader, Record

LOGS = Path(__file__).parents[1] / "fakes" / "logs"
STAMP = "[2026-03-01 12:00:00 TP0] "
BAR = "Loading safetensors checkpoint shards:  25% Completed | {}/{} [00:01<00:03,  1.00s/it]"
MEGABYTE = 1 << 20


# --- every pattern can be found -----------------------------------------------------------------

EXAMPLES = [
    new_args(),
    USER_WARNING,
    "Init torch distributed begin.",
    "Init parallel begin.",
    "Load weight begin. avail mem=78.46 GB",
    "Load weight end. elapsed=20.31 s, type=LlamaForCausalLM, avail mem=62.1 GB",
    "KV Cache is allocated. #tokens: 914573, K size: 20.00 GB, V size: 20.00 GB",
    "Memory pool end. avail mem=12.03 GB",
    "Capture draft extend cuda graph begin. This can take up to several minutes.",
    "Capture draft cuda graph end. Time elapsed: 8.35 s. mem usage=0.50 GB.",
    "Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4",
    "Capture npu graph end. Time elapsed: 1.35 s. mem usage=0.1 GB.",
    "max_total_num_tokens=914573, chunked_prefill_size=8192",
    "INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)",
    READY,
    BAR.format(1, 4),
    "Loading safetensors using Runai Model Streamer:  50%|#####     | 1/2 [00:01<00:01]",
    "Capturing batches (bs=8 avail_mem=15.31 GB):  25%|##        | 1/4 [00:01<00:01]",
    "Entering DeepGEMM JIT Pre-Compile session. It may take long.",
    "Try DeepGEMM JIT Compiling for <GEMM_NT_F8F8BF16> N=2112, K=7168",
    "2025-10-22 10:27:56,123 - INFO - flashinfer.jit: Loading JIT ops: sampling",
    "Running FlashInfer autotune...",
    "FlashInfer autotune completed.",
    "Rank 3: prefetching 5/163 checkpoint shards",
    "Scheduler hit an exception: Traceback (most recent call last):",
    "Initialization failed. warmup error: Traceback (most recent call last):",
    "Fatal Python error: Segmentation fault",
    UNRECOGNIZED,
    "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000)",
    SIGQUIT,
    "SIGQUIT received. signum=3",
    "Rank 0 scheduler is dead. Please check if there are relevant logs.",
    "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9).",
    "Subprocess scheduler_0 (pid=4711) crashed with exit code -9",
    "Exit code: -9",
    "Scheduler or DataParallelController 4711 terminated with 3",
    WATCHDOG,
    NCCL.removeprefix("[rank4]:"),
    "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
    "TP rank 1 could finish the model loading, but there are other ranks that didn't finish.",
    "Failed to load plugin spec_ext from group sglang.srt.plugins",
    "Failed to execute general plugin: spec_ext",
    "spec-ext active: N=4, M=4, K=4",
    "Gracefully exiting... Remaining number of requests 0",
    "Traceback (most recent call last):",
]


def test_a_line_of_each_pattern_is_found_in_a_flood_of_other_lines() -> None:
    """Also where all digits were taken out, as they are before a flood is searched."""
    met: set[LinePattern] = set()
    floods = [block(flood(), 2 * BLOCK), block(distinct(), 2 * BLOCK), junk(2 * BLOCK) + b"\n"]
    for line in EXAMPLES:
        found = classify(line)
        assert found is not None, line
        met.add(found[0])
        text = re.sub(rb"\d", b"", line.encode())
        assert found[0].anchor in text, line
        (scout,) = [s for s in patterns.scouted(ANCHORS) if found[0].anchor in s.anchors]
        assert scout.literal in text, line
        assert scout.rare in scout.literal
        for others in floods:
            (record,) = read(others + f"{STAMP}{line}\n".encode() + others)
            assert record.pattern is found[0], line
    assert met == set(PATTERNS)


# --- the same as reading every line -------------------------------------------------------------


class EveryLine(LogReader):
    """Looks at every line that holds an anchor, one by one: no blocks, scouts, kinds or limits."""

    def _hits(
        self, data: bytes, begin: int, end: int, anchors: list[bytes]
    ) -> list[tuple[int, int]]:
        lines, at = [], begin
        while at < end:
            line_end = data.find(b"\n", at)
            if any(anchor in data[at:line_end] for anchor in self._anchors):
                lines.append((at, line_end))
            at = line_end + 1
        return lines[::-1]


def read(data: bytes, size: int | None = None, kind: type[LogReader] = LogReader) -> list[Record]:
    instance = kind()
    step = size or max(len(data), 1)
    records = [r for at in range(0, len(data), step) for r in instance.feed(data[at : at + step])]
    return records + instance.finish()


def slowly(data: bytes) -> list[Record]:
    """Line by line; bars as they end, not while they are drawn."""
    instance = EveryLine()
    lines = data.replace(b"\r", b"\n").split(b"\n")
    records = [record for line in lines[:-1] for record in instance.feed(line + b"\n")]
    return [*records, *(instance.feed(lines[-1]) if lines[-1] else []), *instance.finish()]


def told(records: list[Record], bars: bool) -> list[tuple[object, ...]]:
    return [
        (r.pattern.kind, r.message, r.rank, r.stamp, r.exceptions, r.block)
        for r in records
        if bars or r.pattern.kind is not Kind.BAR
    ]


def joined(log: LogWriter) -> bytes:
    return b"".join(line.data for line in log.lines)


CRASH = f"[2026-03-01 12:00:09 TP3] {NINJA}\n[2026-03-01 12:00:09 TP0] {CLOSED}\n".encode()
WRITTEN = {
    "old": joined(boot_old(2)),
    "new": joined(boot_new(8)),
    "crash": joined(boot_new(2)) + CRASH + SIGQUIT.encode() + b"\n",
    "handled": f"[2026-03-01 12:00:00] {HANDLED}\n".encode() + joined(boot_new(2)),
}
CASES = {**{path.name: path.read_bytes() for path in LOGS.iterdir()}, **WRITTEN}


@pytest.mark.parametrize("before", [b"", b"sglang-1  | "])
@pytest.mark.parametrize("name", CASES)
def test_blocks_give_what_every_line_gives(name: str, before: bytes) -> None:
    data = b"".join(before + line for line in CASES[name].splitlines(keepends=True))
    expected = slowly(data)
    assert len(expected) > 10
    assert told(read(data), bars=True) == told(expected, bars=True)
    for size in (65536, 4096, 1000, 61):
        assert told(read(data, size), bars=False) == told(expected, bars=False), size


@pytest.mark.parametrize("name", CASES)
def test_a_cut_at_any_byte_changes_nothing(name: str) -> None:
    """Inside a marker, a number, a character of three bytes, between \\r and \\n."""
    data = CASES[name]
    expected = slowly(data)
    one_by_one = read(data, 1)
    assert told(one_by_one, bars=False) == told(expected, bars=False)
    shown = {(r.match["done"], r.match["total"]) for r in expected if r.pattern.kind is Kind.BAR}
    drawn = {(r.match["done"], r.match["total"]) for r in one_by_one if r.pattern.kind is Kind.BAR}
    assert shown == drawn


@pytest.mark.parametrize("others", ["flood", "distinct"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_log_that_is_spread_over_many_blocks_reads_the_same(name: str, others: str) -> None:
    """Every line of the log is followed by some kilobytes of what other programs write."""
    noise = flood() if others == "flood" else distinct()
    data = b"".join(line + block(noise, 9000) for line in WRITTEN[name].splitlines(keepends=True))
    assert len(data) > 2 * BLOCK
    expected = told(slowly(data), bars=True)
    for size in (None, MEGABYTE, 65536):
        assert told(read(data, size), bars=True) == expected, size


def test_a_marker_across_the_end_of_a_block_is_found() -> None:
    line = f"{STAMP}{READY}\n".encode()
    for before in range(BLOCK - len(line), BLOCK + 1):
        (record,) = read(b"x" * (before - 1) + b"\n" + line + b"y" * 100 + b"\n")
        assert record.message == READY


def test_of_a_flood_of_bars_the_newest_counts() -> None:
    """A phase, far too many bars, the next phase: the state of the boot is as if all were read."""
    begin = f"{STAMP}Load weight begin. avail mem=78.46 GB\n".encode()
    bars = [f"\r{BAR.format(at, 5000)}".encode() for at in range(5000)]
    data = joined(boot_new(1)).partition(b"Load weight begin")[0].rpartition(b"\n")[0] + b"\n"
    end = f"\n{STAMP}Load weight end. elapsed=20.31 s, type=L, avail mem=62.1 GB\n".encode()
    seen = []
    for kind in (LogReader, EveryLine):
        for size in (None, 65536):
            state, instance = BootState(0.0), kind()
            text = data + begin + b"".join(bars) + end
            step = size or len(text)
            for at in range(0, len(text), step):
                state.on_records(instance.feed(text[at : at + step]), 1.0)
            span = next(span for span in state.spans if span.phase is patterns.Phase.TARGET_WEIGHTS)
            seen.append((span.done, span.total, sorted(span.ranks), state.liveness.moved_at))
            if kind is LogReader:
                assert instance.lines_examined < 2 * MAX_IN_A_ROW
    assert seen == [(4999, 5000, ["TP0"], 1.0)] * 4


# --- and little work ----------------------------------------------------------------------------


def flood() -> Iterator[str]:
    """What a server writes that serves: the same few lines with other numbers."""
    at = 0
    while True:
        at += 1
        yield (
            f"{STAMP}Decode batch, #running-req: {at % 64}, #token: {at}, token usage: 0.10, "
            "accept len: 2.17, cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0"
        )
        yield f'[2026-03-01 12:00:00] INFO:     127.0.0.1:{at} - "POST /generate HTTP/1.1" 200 OK'
        yield f"{STAMP}Request {at} took {at * 7} steps, which nobody has asked for"
        yield FLOOD


def distinct() -> Iterator[str]:
    """Lines of which none is like another."""
    source = random.Random(7)
    while True:
        words = " ".join("".join(source.choices("abcdefghij", k=6)) for _ in range(12))
        yield f"{STAMP}INFO {words}"


def bars() -> Iterator[str]:
    """Also lines of `tqdm` that are no bar of SGLang's."""
    at = 0
    while True:
        at += 1
        yield f"\r{BAR.format(at % 163, 163)}"
        yield f"\rmodel-00001.safetensors:  25%|##   | {at}M/4.9G [00:01<00:03, 400MB/s]"


def block(lines: Iterator[str], size: int) -> bytes:
    text: list[str] = []
    while size > 0:
        text.append(next(lines) + "\n")
        size -= len(text[-1])
    return "".join(text).encode()


def junk(size: int) -> bytes:
    return random.Random(1).randbytes(size)


LOADS = {
    "flood": block(flood(), 4 * MEGABYTE),
    "distinct": block(distinct(), 4 * MEGABYTE),
    "bars": block(bars(), 4 * MEGABYTE).replace(b"\n", b""),
    "long lines": (b"once upon a time and so on; " * 40_000 + b"\n") * 4,
    "a line without end": b"once upon a time and so on; " * 150_000,
    "binary": junk(4 * MEGABYTE),
    "zeros": bytes(4 * MEGABYTE),
    "empty lines": b"\n" * (2 * MEGABYTE),
}


@pytest.mark.parametrize("size", [4 * MEGABYTE, 65536])
@pytest.mark.parametrize("name", LOADS)
def test_a_large_log_costs_a_search_and_no_look_at_its_lines(name: str, size: int) -> None:
    data = LOADS[name]
    instance = LogReader()
    for at in range(0, len(data), size):
        instance.feed(data[at : at + size])
    # The newest bar of each block, and the one that is being drawn at the end of a piece.
    newest = len(data) // BLOCK + 2 * (len(data) // size) + 2
    allowed = MAX_IN_A_ROW + newest if name == "bars" else 0
    assert instance.lines_examined <= allowed
    if name in ("distinct", "binary"):
        assert instance.bytes_split < SAMPLE, "not worth it where every line is another"
    *_, record = instance.feed(f"\n[2026-03-01 12:00:00] {READY}\n".encode())
    assert record.pattern.kind is Kind.READY


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were searched for anchors, each time."""
    sizes: list[int] = []
    search = LogReader._anchors_in

    def counted(self: LogReader, text: bytes, begin: int, end: int) -> list[bytes]:
        sizes.append(end - begin)
        return search(self, text, begin, end)

    monkeypatch.setattr(LogReader, "_anchors_in", counted)
    return sizes


def test_a_flood_is_searched_once_for_all_its_lines(searched: list[int]) -> None:
    instance = LogReader()
    instance.feed(LOADS["flood"])
    assert instance.take_growth() == Growth(news=True, batches=True)
    assert sum(searched) < len(LOADS["flood"]) / 100


def test_of_binary_rubbish_only_bytes_that_anchors_have_are_searched(searched: list[int]) -> None:
    LogReader().feed(LOADS["binary"])
    assert 0 < sum(searched) < len(LOADS["binary"]) / 4


def test_few_literals_are_looked_for_in_every_block() -> None:
    """Each is a walk over the whole log: some 25 ms per 100 MB."""
    assert len(patterns.scouted(ANCHORS)) <= 26
    assert len(patterns.scouted(patterns.ANCHORS_AFTER_READY)) <= 14


def test_a_flood_of_tracebacks_is_bounded() -> None:
    one = f"oh\n{HANDLED.partition(chr(10))[2]}\n[2026-03-01 12:00:00] next\n".encode()
    instance = LogReader()
    assert len(instance.feed(one * 5000)) == reader.MAX_TRACEBACKS
    examined = instance.lines_examined
    assert examined < 10 * reader.MAX_TRACEBACKS
    assert instance.feed(one * 5000) == []
    assert instance.lines_examined == examined
    again = instance.feed(f"[2026-03-01 12:00:00] {new_args()}\n".encode() + one)
    assert [record.pattern.kind for record in again] == [Kind.ARGS, Kind.TRACEBACK]
