"""Child processes that never outlive the demo, and signals that never interrupt their clean-up.

Standard library only, Linux only (/proc).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

_NO_SIGNAL = 0  # kill(2): only checks that the process exists
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt, at a moment that is safe."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._raised_at = float("-inf")
        self._holds = 0

    def install(self) -> None:
        for number in _SIGNALS:
            # nohup and a shell's `&` ignore some of them on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Signals that come inside are raised at the end: for starting and stopping a child."""
        before = self.received
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if not self._holds and self.received != before:
            self._raise()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self._holds:
            self._raise()

    def _raise(self) -> None:
        # A closing terminal sends several signals at once: the second must not cut short the
        # unwinding that the first began.
        now = time.monotonic()
        if now - self._raised_at > 2.0:
            self._raised_at = now
            raise KeyboardInterrupt


INTERRUPTS = Interrupts()


class ProcessTree:
    """A command in a session of its own, and everything that it starts.

    A context manager: it starts on entering; leaving stops the whole tree, whatever the reason.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None):
        """log: gets stdout and stderr, from the beginning of the file."""
        self._command = command
        self._log = log
        self._env = env
        self._leader: subprocess.Popen[bytes] | None = None

    def exit_status(self) -> int | None:
        """None while the command runs; negative where a signal ended it."""
        assert self._leader is not None, "not started"
        return self._leader.poll()

    def stop(self) -> None:
        """Ends every process of the tree, by force after a second; returns when all are gone.

        Raises RuntimeError with the pids of processes that survive SIGKILL for 10 seconds.
        """
        if self._leader is None:
            return
        with INTERRUPTS.held():
            # SGLang's own answer to SIGTERM takes 5 seconds and more, too long for a Ctrl-C.
            left = _signal_until_gone(self._leader, signal.SIGTERM, 1.0)
            if left and self._leader.poll() is None:
                # Python's resource tracker ignores SIGTERM, and cleans up once its users are gone.
                self._leader.kill()
                left = _signal_until_gone(self._leader, _NO_SIGNAL, 2.0)
            if left:
                left = _signal_until_gone(self._leader, signal.SIGKILL, 10.0)
            if left:
                raise RuntimeError(f"could not stop the processes {left}")

    def __enter__(self) -> ProcessTree:
        try:
            with INTERRUPTS.held(), self._log.open("wb") as output:
                # A session of its own keeps the terminal's Ctrl-C away from it: we alone stop it.
                self._leader = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                )
        except BaseException:  # an interrupt that was held back: nobody will call __exit__
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def session_members(session: int) -> list[int]:
    """Pids of the living processes (no zombies) whose session id is `session`."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        # The command name is in parentheses and may itself hold spaces and parentheses.
        state, _parent, _group, its_session = stat.rpartition(")")[2].split()[:4]
        if int(its_session) == session and state not in ("Z", "X"):
            members.append(int(entry.name))
    return members


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _signal_until_gone(
    leader: subprocess.Popen[bytes], number: int, patience_s: float
) -> list[int]:
    """Sends `number` once to each process of the session, late ones too; returns who is left."""
    deadline = time.monotonic() + patience_s
    told: set[int] = set()
    while True:
        leader.poll()  # a zombie is not gone before its parent has looked
        members = session_members(leader.pid)
        if not members or time.monotonic() > deadline:
            return members
        for pid in members:
            if pid not in told:
                told.add(pid)
                _send(pid, number)
        time.sleep(0.05)
