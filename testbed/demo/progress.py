"""What a waiting person sees: the current phase and the time. Standard library only."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_REPEAT_S = 30.0


class Progress:
    """One line that changes in place on a terminal; a pipe gets a line per phase.

    In a pipe the current phase is repeated every 30 seconds, so that a log shows life.
    """

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title = title
        self._stream = stream
        self._live = stream.isatty()
        self._start = time.monotonic()
        self._phase = ""
        self._printed_at = 0.0

    def update(self, phase: str, detail: str = "") -> None:
        """phase: what goes on; detail: what changes within it, such as a package name."""
        text = f"{self._title}: {phase}" + (f", {detail}" if detail else "")
        line = f"{elapsed(time.monotonic() - self._start)}  {text}"
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r\033[K" + line[:width])
            self._stream.flush()
            return
        now = time.monotonic()
        if phase != self._phase or now - self._printed_at >= _REPEAT_S:
            self._phase, self._printed_at = phase, now
            self._stream.write(line + "\n")
            self._stream.flush()

    def done(self, result: str) -> None:
        """Replaces the changing line by a last one."""
        line = f"{elapsed(time.monotonic() - self._start)}  {self._title}: {result}"
        self._stream.write(("\r\033[K" if self._live else "") + line + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Removes the changing line, so that another message can start there."""
        if self._live:
            self._stream.write("\r\033[K")
            self._stream.flush()


def elapsed(seconds: float) -> str:
    """Minutes and seconds, such as ``3:07``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
