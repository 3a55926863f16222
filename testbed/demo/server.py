"""A server of the tiny model on a free port, from its first log line to its last process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_spec_ext.ops.bench.server import free_port
from testbed import engine
from testbed.demo import DemoError
from testbed.demo.processes import ProcessTree
from testbed.demo.progress import Progress
from testbed.demo.server_log import (
    READY,
    LogFollower,
    boot_phase,
    cause_of_failure,
    parse,
)
from testbed.demo.verdict import Event

_BOOT_LIMIT_S = 900.0
_QUIET_S = 0.5
_PORT_TRIES = 3


class _PortTaken(Exception):
    pass


class Server:
    """A server that is ready for requests at `url`."""

    def __init__(self, url: str, log: LogFollower) -> None:
        self.url = url
        self._log = log

    def new_events(self) -> list[Event]:
        """The decode steps and switches that the server has logged since the last call."""
        return [event for line in self._log.new_lines() if (event := parse(line)) is not None]

    def settled_events(self) -> list[Event]:
        """As `new_events`, after waiting until the server logs nothing more.

        A response may arrive before the log line of the step that completed it.
        """
        events: list[Event] = []
        while True:
            time.sleep(_QUIET_S)
            new = self.new_events()
            if not new:
                return events
            events += new


@contextmanager
def running_server(title: str, topk: int | None, log: Path, **flags: Any) -> Iterator[Server]:
    """Boots a server, showing how far it is, and stops all its processes on leaving.

    topk and flags: as `engine.command_line`. log: the file for its output. Raises DemoError if
    it does not become ready, with the cause that its log gives.
    """
    for tries_left in reversed(range(_PORT_TRIES)):
        port = free_port()
        # A step per line: see `verdict.summarize`.
        command = engine.command_line(topk, port=port, decode_log_interval=1, **flags)
        with ProcessTree(command, log, engine.process_environment()) as process:
            follower = LogFollower(log)
            try:
                _wait_until_ready(title, process, follower)
            except _PortTaken:
                # Between our look and the server's bind, another program got it.
                if tries_left:
                    continue
                raise DemoError(f"{title}: found no port that stays free") from None
            try:
                yield Server(f"http://127.0.0.1:{port}", follower)
            except DemoError as error:
                time.sleep(1)  # its connections end before the process does
                if process.exit_status() is None:
                    raise
                raise DemoError(f"{error}; {_end_of(process, log)}") from None
            return


def _wait_until_ready(title: str, process: ProcessTree, log: LogFollower) -> None:
    progress = Progress(title, sys.stdout)
    phase = "importing torch and SGLang"
    lines: list[str] = []
    deadline = time.monotonic() + _BOOT_LIMIT_S
    try:
        while True:
            status = process.exit_status()  # before reading: a dead server's log is complete
            for line in log.new_lines():
                lines.append(line)
                phase = boot_phase(line) or phase
            if status is not None:
                if any("address already in use" in line for line in lines):
                    raise _PortTaken
                raise DemoError(f"{title}, {phase}: {_end_of(process, log.path)}")
            if time.monotonic() > deadline:
                raise DemoError(f"{title}: not ready after {_BOOT_LIMIT_S:.0f} s, at: {phase}")
            if phase == READY:
                break
            progress.update(phase)
            time.sleep(0.2)
    except BaseException:
        progress.clear()
        raise
    progress.done(READY)


def _end_of(process: ProcessTree, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return f"it ended with status {process.exit_status()}: {cause_of_failure(lines)}"
