#!/usr/bin/env python3
"""What reading 100 MB of log costs `sglang-spec-ext wait`, in seconds of CPU, by kind of log.

    python benchmarks/log_cost.py

Each log is written to a temporary folder, then read by a process of its own as `wait` reads it:
from a file in large pieces, and as a pipe hands it out. CPU time is what the process used, user
and system, without its start. The raw result goes to a file, its table to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine

sys.path.insert(0, str(machine.ROOT))  # the reader of this checkout, installed or not

from sglang_spec_ext import __version__

SIZE = 100 << 20
MODES = ("file", "pipe")
CHILD = "--read"
BOOT = machine.ROOT / "tests" / "fakes" / "logs" / "sglang-0.5.17-h200-eagle3.log"
READY = b"[2026-03-01 12:00:00] The server is fired up and ready to roll!\n"


def decode(source: random.Random) -> Iterator[bytes]:
    at = 0
    while True:
        at += 1
        yield (
            f"[2026-03-01 12:{at // 60 % 60:02d}:{at % 60:02d} TP0] Decode batch, #running-req: "
            f"{at % 64}, #token: {source.randrange(10**6)}, token usage: {source.random():.2f}, "
            f"accept len: {1 + 3 * source.random():.2f}, cuda graph: True, gen throughput "
            f"(token/s): {9999 * source.random():.2f}, #queue-req: {at % 7}\n"
        ).encode()


def different(source: random.Random) -> Iterator[bytes]:
    at = 0
    while True:
        at += 1
        text = "".join(source.choices(string.ascii_lowercase + " ", k=85))
        yield f"[2026-03-01 12:00:{at % 60:02d} TP0] INFO request {at} {text}\n".encode()


def both(source: random.Random) -> Iterator[bytes]:
    kinds = decode(source), different(source)
    while True:
        yield from map(next, kinds)


def bars(source: random.Random) -> Iterator[bytes]:
    at = 0
    while True:
        at += 1
        yield (
            f"\rLoading safetensors checkpoint shards: {at % 100:3d}% Completed | {at % 163}/163 "
            f"[00:{at % 60:02d}<00:{59 - at % 60:02d}, {9 * source.random():.2f}it/s]"
        ).encode()


def long_lines(source: random.Random) -> Iterator[bytes]:
    text = "".join(source.choices(string.ascii_letters + string.digits + " ,._", k=1 << 16))
    while True:
        yield text.encode() * 50 + b"\n"


def no_line_end(source: random.Random) -> Iterator[bytes]:
    text = "".join(source.choices(string.ascii_lowercase + " ", k=1 << 16)).encode()
    while True:
        yield text


def binary(source: random.Random) -> Iterator[bytes]:
    while True:
        yield source.randbytes(1 << 20)


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[bytes]], bool]] = {
    "decode batches, each with other numbers": (decode, True),
    "lines that are all different, after a boot": (different, True),
    "lines that are all different, no boot before": (different, False),
    "both in turn, no boot before": (both, False),
    "progress bars with carriage returns": (bars, False),
    "lines of 3 MB": (long_lines, False),
    "one line without an end": (no_line_end, False),
    "random bytes": (binary, False),
}


def write(path: Path, lines: Iterator[bytes], boot: bool) -> None:
    with path.open("wb") as file:
        if boot:
            file.write(BOOT.read_bytes() + READY)
        while file.tell() < SIZE:
            file.write(next(lines))


def cost(path: Path, pipe: bool) -> dict[str, float]:
    """Read the log in this process, which is there for nothing else."""
    from sglang_spec_ext.ops.wait.follow import LogFile, LogPipe
    from sglang_spec_ext.ops.wait.reader import LogReader

    log = LogPipe(sys.stdin.fileno()) if pipe else LogFile(path)
    if pipe:
        os.set_blocking(sys.stdin.fileno(), True)
    reader = LogReader()
    before = resource.getrusage(resource.RUSAGE_SELF)
    records = 0
    for piece in log.read_new():
        records += len(reader.feed(piece))
        reader.take_growth()
    records += len(reader.finish())
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 3), "lines": reader.lines_examined}


def measure(path: Path, pipe: bool) -> dict[str, float]:
    """In a process of its own, see `cost`."""
    with path.open("rb") as file:
        feed = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        command = [sys.executable, __file__, CHILD, "pipe" if pipe else "file", str(path)]
        told: dict[str, float] = json.loads(subprocess.check_output(command, stdin=feed.stdout))
        feed.kill()
        feed.wait()
    return told


def table(result: dict[str, Any]) -> str:
    """As `docs/operator-tools.md` has it: lowest and highest of the runs."""
    lines = ["| log | as a file | through a pipe |", "|---|---|---|"]
    for name, modes in result["cpu_seconds"].items():
        spans = [f"{min(modes[mode]):.2f} - {max(modes[mode]):.2f}" for mode in MODES]
        lines.append(f"| {name} | {' | '.join(spans)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "log-cost.json")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {}
    lines: dict[str, dict[str, float]] = {}
    result = {
        "what": f"CPU seconds of a process that reads {SIZE >> 20} MiB of log as `wait` does, "
        "and how many lines it looked at one by one",
        "command": f"python benchmarks/log_cost.py --runs {options.runs}",
        "machine": machine.describe(),
        "sglang_spec_ext": __version__,
        "cpu_seconds": seconds,
        "lines_looked_at": lines,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        for name, (source, boot) in KINDS.items():
            write(path, source(random.Random(1)), boot)
            seconds[name], lines[name] = {mode: [] for mode in MODES}, {}
            for _ in range(options.runs):
                for mode in MODES:
                    told = measure(path, mode == "pipe")
                    seconds[name][mode].append(told["seconds"])
                    lines[name][mode] = told["lines"]
            print(f"{name}: {seconds[name]}", file=sys.stderr, flush=True)
    machine.write(result, options.out)
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        print(json.dumps(cost(Path(sys.argv[3]), sys.argv[2] == "pipe")))
    else:
        main()
