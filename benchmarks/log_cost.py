#!/usr/bin/env python3
"""What reading 100 MB of log costs `sglang-spec-ext wait`, in seconds of CPU, by kind of log.

    python benchmarks/log_cost.py

Each log is written to a temporary folder, then read by a process of its own as `wait` reads it:
from a file in large pieces, and as a pipe hands it out. CPU time is what the process used, user
and system, without its start.
"""

from __future__ import annotations

import os
import random
import resource
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SIZE = 100 << 20
PIPE = 1 << 16  # bytes per read
BOOT = Path(__file__).parents[1] / "tests" / "fakes" / "logs" / "sglang-0.5.17-h200-eagle3.log"
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


def cost(path: Path, pipe: bool) -> str:
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
    return f"{seconds:.2f} s, {reader.lines_examined} lines looked at"


def main() -> None:
    print(f"CPU time for {SIZE >> 20} MB, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        for name, (lines, boot) in KINDS.items():
            write(path, lines(random.Random(1)), boot)
            told = []
            for mode in ("file", "pipe"):
                with path.open("rb") as file:
                    feed = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
                    command = [sys.executable, __file__, mode, str(path)]
                    told.append(subprocess.check_output(command, stdin=feed.stdout, text=True))
                    feed.kill()
                    feed.wait()
            print(f"{name:46} file {told[0].strip()}; pipe {told[1].strip()}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(cost(Path(sys.argv[2]), sys.argv[1] == "pipe"))
    else:
        main()
