"""Bytes of a log to records: prefixes, bars without an end, interleaving, rubbish, and cost."""

from __future__ import annotations

import json
import random

import pytest
from wait_logs import CLOSED, FLOOD, HANDLED, NINJA, READY, LogWriter, boot_new, boot_old

from sglang_spec_ext.ops.wait.patterns import Kind
from sglang_spec_ext.ops.wait.reader import MAX_LINE, LogReader, Record


def read(data: bytes, size: int | None = None) -> list[Record]:
    reader = LogReader()
    step = size or len(data)
    records = [
        record for at in range(0, len(data), step) for record in reader.feed(data[at : at + step])
    ]
    return records + reader.finish()


def kinds(data: bytes) -> list[Kind]:
    return [record.pattern.kind for record in read(data)]


def joined(log: LogWriter) -> bytes:
    return b"".join(line.data for line in log.lines)


@pytest.mark.parametrize("log", [boot_old(2), boot_new(2)], ids=["old", "new"])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_pieces_of_any_size_give_the_same_records(log: LogWriter, size: int) -> None:
    def said(records: list[Record]) -> set[tuple[str, str]]:
        return {(record.message, record.rank) for record in records}

    whole, pieces = read(joined(log)), read(joined(log), size)
    # A bar that is being drawn is read early and may be seen with part of its line.
    bars = [record for record in pieces if record.pattern.kind is Kind.BAR]
    assert said(whole) <= said(pieces)
    assert said(pieces) - said(whole) <= said(bars)


TRANSPORTS = [
    "sglang-1  | ",
    "2026-09-22T06:50:07.810Z ",
    "2026-09-22T06:50:07.810123456Z stderr F ",
    "Sep 22 06:50:07 gpu-box sglang[4711]: ",
    "2026-09-22T06:50:07+0000 gpu-box python3[4711]: ",
    "Sep 22 06:50:07.123456 gpu-box sglang[4711]: ",
    "Tue 2026-09-22 06:50:07 UTC gpu-box sglang.service[4711]: ",
    "\x1b[36msglang-1  | \x1b[0m",
    "stack_sglang.1.x7f@gpu-box    | ",
    "[pod/sglang-0/server] ",
    "(SchedulerActor pid=4711, ip=10.0.0.3) ",
    "sglang_1 | 2026-09-22T06:50:07.810Z ",
]


@pytest.mark.parametrize("transport", ["", *TRANSPORTS])
def test_prefixes_of_supervisors_are_taken_off(transport: str) -> None:
    lines = [
        "[2026-03-01 12:00:00 DP1 TP5 EP5] Load weight begin. avail mem=22.46 GB",
        "[2026-03-01 12:00:01.123 TP3] Memory pool end. avail mem=1.0 GB",
        "[TP0] Memory pool end. avail mem=1.0 GB",
        "[2026-03-01 12:00:02] " + READY,
    ]
    data = "".join(f"{transport}{line}\n" for line in lines).encode()
    found = [(record.pattern.kind, record.rank) for record in read(data)]
    assert found == [
        (Kind.BEGIN, "DP1 TP5"),
        (Kind.END, "TP3"),
        (Kind.END, "TP0"),
        (Kind.READY, ""),
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_traceback_behind_a_supervisor_keeps_its_first_exception(transport: str) -> None:
    lines = f"[2026-03-01 12:00:00 TP3] {NINJA}".splitlines()
    (record,) = read("".join(f"{transport}{line}\n" for line in lines).encode())
    assert record.rank == "TP3"
    assert record.exceptions == (
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
        "RuntimeError: Ninja build failed",
    )


def test_dockers_json_file_is_unwrapped() -> None:
    bars = "\rCapturing batches (bs=8 avail_mem=1 GB):  50%|## | 1/2 [00:01<00:01]"
    lines = [bars + "[2026-03-01 12:00:00] Capture cuda graph end. Time elapsed: 1 s.\n", READY]
    data = "".join(
        json.dumps({"log": text, "stream": "stderr", "time": "2026-03-01T12:00:00Z"}) + "\n"
        for text in lines
    ).encode()
    assert kinds(data) == [Kind.BAR, Kind.END, Kind.READY]


def test_a_record_that_sticks_to_a_bar_is_seen_with_its_rank() -> None:
    data = (
        b"\rCapturing batches (bs=1 avail_mem=15.31 GB): 100%|\xe2\x96\x88\xe2\x96\x88| 23/23 "
        b"[00:05<00:00,  4.2it/s][2026-03-01 12:00:09 TP1] Capture cuda graph end. Time elapsed\n"
    )
    bar, end = read(data)
    assert (bar.match["done"], bar.match["total"]) == ("23", "23")
    assert (end.pattern.kind, end.rank) == (Kind.END, "TP1")


def test_a_bar_counts_while_it_is_drawn() -> None:
    reader = LogReader()
    assert reader.feed(b"\rLoading safetensors checkpoint shards:  25% Comp") == []
    (record,) = reader.feed(b"leted | 1/4 [00:01<00:03,  1.00s/it]\n"[:-1])
    assert record.match["done"] == "1"


def test_binary_rubbish_and_endless_lines_do_no_harm() -> None:
    rubbish = random.Random(1).randbytes(3_000_000)
    data = b"\x00\xff" + rubbish + b"\n" + f"[2026-03-01 12:00:00] {READY}\n".encode()
    reader = LogReader()
    found = [r for at in range(0, len(data), 65536) for r in reader.feed(data[at : at + 65536])]
    assert [record.pattern.kind for record in found] == [Kind.READY]
    endless = LogReader()
    for _ in range(40):
        endless.feed(b"x" * 100_000)
        assert len(endless._tail) <= MAX_LINE
    assert endless.feed(f"\n[2026-03-01 12:00:00] {READY}\n".encode())


def test_an_unfinished_last_line_counts_when_nothing_more_can_come() -> None:
    reader = LogReader()
    assert reader.feed(b"launch_server.py: error: unrecognized arguments: --x") == []
    (record,) = reader.finish()
    assert record.match["cause"] == "unrecognized arguments: --x"


def test_another_process_may_write_into_a_traceback() -> None:
    lines = f"[2026-03-01 12:00:00 TP3] {NINJA}".splitlines()
    lines.insert(3, "[2026-03-01 12:00:00 TP1] Load weight begin. avail mem=22.46 GB")
    begin, failed = read("\n".join(lines).encode() + b"\n")
    assert (begin.pattern.kind, begin.rank) == (Kind.BEGIN, "TP1")
    assert (failed.rank, failed.exceptions[0][:17]) == ("TP3", "FileNotFoundError")


def test_two_tracebacks_in_a_row_keep_their_ranks_and_order() -> None:
    data = f"[2026-03-01 12:00:00 TP3] {NINJA}\n[2026-03-01 12:00:00 TP0] {CLOSED}\n".encode()
    first, second = read(data)
    assert (first.rank, second.rank) == ("TP3", "TP0")
    assert second.exceptions[0].endswith("Connection closed by peer [10.0.0.1]:11223")


def test_a_bare_traceback_gets_the_line_above_as_its_heading() -> None:
    note, traceback = read(f"[2026-03-01 12:00:00] {HANDLED}\n".encode())
    assert note.pattern.kind is Kind.NOTE
    assert traceback.message.startswith("Failed to load plugin other")
    assert traceback.exceptions == ("ModuleNotFoundError: No module named 'other.plugin'",)


@pytest.mark.parametrize(
    "line",
    [
        "ninja: error: loading 'build.ninja': No such file or directory",
        "g++: error: unrecognized command-line option '-foo'",
        "[2026-03-01 12:00:00] Receive: obj=GenerateReqInput(text='Scheduler hit an exception: x')",
        "[2026-03-01 12:00:00 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1, "
        "#new_token_ratio: 0.1 -> 0.3",
        "[2026-03-01 12:00:00] Ignore import error when loading sglang.srt.models.grok: no module",
    ],
)
def test_lines_that_only_look_like_the_end_are_nothing(line: str) -> None:
    assert kinds(line.encode() + b"\n") == []


def test_routine_lines_are_no_sign_of_life_and_others_are() -> None:
    reader = LogReader()
    reader.feed(b'[2026-03-01 12:00:00] INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 503 Serv\n')
    assert not reader.take_growth().news
    reader.feed(b"[2026-03-01 12:00:00] Health check failed. Server couldn't get a response\n")
    assert not reader.take_growth().news
    reader.feed(FLOOD.encode() + b"\n")
    assert reader.take_growth().news


def test_a_complaint_said_often_hides_no_sign_of_life() -> None:
    reader = LogReader()
    complaint = b"[2026-03-01 12:00:00] Health check failed. Server couldn't get a response\n"
    reader.feed(complaint * 3 + FLOOD.encode() + b"\n")
    assert reader.take_growth().news


def test_what_users_wrote_is_no_record_even_where_it_looks_like_one() -> None:
    """Other lines make the reader look for the words; a record's prefix splits what sticks."""
    text = "[2026-03-01 12:00:00] Scheduler hit an exception: all of it"
    lines = [
        f"[2026-03-01 12:00:00] Receive: obj=GenerateReqInput(text='so {text}')",
        f"[2026-03-01 12:00:00] Finish: obj=GenerateReqInput(text='x'), out={{'text': '{text}'}}",
        "why does a server say that its scheduler hit an exception",
    ]
    assert kinds("\n".join([*lines, ""]).encode()) == []
    assert kinds(f"a bar: 7/8 {text}\n".encode()) == [Kind.FAILED]


def test_last_lines_leave_the_routine_out() -> None:
    reader = LogReader()
    reader.feed(b"something odd\n")
    reader.feed(b"[2026-03-01 12:00:00 TP0] Decode batch, #running-req: 1\n" * 1000)
    assert reader.last_lines() == ["something odd"]
