"""What the demo reads out of log files. Standard library only, nothing here but text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SPECULATING = "speculating"
TARGET_ONLY = "target-only"
READY = "ready"

_SWITCH = re.compile(
    r"spec-ext switch: (?P<old>speculating|target-only) -> (?P<new>speculating|target-only), "
    r"batch=(?P<batch>\d+), N=(?P<n>\d+), M=(?P<m>\d+), steps since last switch=\d+"
)
_DECODE = re.compile(r"Decode batch.*?#running-req: (?P<running>\d+)")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")
_ACCEPT = re.compile(r"accept len: (?P<length>\d+(?:\.\d+)?)")

# In the order in which a booting server prints them.
_BOOT_PHASES = (
    ("server_args=", "starting the scheduler"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "weights loaded"),
    ("KV Cache is allocated", "KV cache allocated"),
    ("spec-ext active", "plugin active"),
    ("Uvicorn running", "HTTP server up, warming up"),
    ("The server is fired up and ready to roll", READY),
)


@dataclass(frozen=True)
class Switch:
    """One change of mode. `batch` is the number of running requests, `line` the whole log line."""

    new_mode: str
    batch: int
    n: int
    m: int
    line: str


@dataclass(frozen=True)
class DecodeStep:
    """One "Decode batch" line; accept_length in tokens per verify, None while target-only."""

    running: int
    accept_length: float | None


def parse(line: str) -> Switch | DecodeStep | None:
    """The event that a server's log line reports, None for any other line."""
    if match := _SWITCH.search(line):
        return Switch(match["new"], int(match["batch"]), int(match["n"]), int(match["m"]), line)
    if match := _DECODE.search(line):
        accept = _ACCEPT.search(line)
        return DecodeStep(int(match["running"]), float(accept["length"]) if accept else None)
    return None


def boot_phase(line: str) -> str | None:
    """The phase of the boot that begins with this line; `READY` when requests are welcome."""
    return next((phase for mark, phase in _BOOT_PHASES if mark in line), None)


def cause_of_failure(lines: Iterable[str]) -> str:
    """What a dead server's log says last, after the first exception in it if there is one.

    The *first* traceback: later ones are other processes that notice. But SGLang also goes on
    after some exceptions, so that the last word can be another one.
    """
    said = [re.sub(r"^\[[^]]*\] ", "", line).rstrip() for line in lines if line.strip()]
    if not said:
        return "its log is empty"
    traceback = next((i for i, line in enumerate(said) if line.startswith("Traceback (")), None)
    if traceback is None:
        return said[-1]
    exceptions = (line for line in said[traceback:] if _EXCEPTION.match(line))
    first = next(exceptions, said[-1])
    return first if first == said[-1] else f"{first} ... {said[-1]}"


class LogFollower:
    """Hands out the lines of a growing file, whole ones only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new_lines(self) -> list[str]:
        """The lines that have been completed since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole, newline, _rest = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()
