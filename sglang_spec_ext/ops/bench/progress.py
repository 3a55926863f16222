"""What is happening now, on stderr: live bars on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_SIGN_OF_LIFE_S = 30.0


class Reporter:
    """``say`` keeps a line such as ``[  63.2 s] off, boot 1 of 2: up after 61.0 s``; ``begin`` and
    ``advance`` move the bar of what runs now, ``level_done`` the bar of the whole sweep."""

    def __init__(self, total_levels: int) -> None:
        console = Console(stderr=True, highlight=False)
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
            transient=True,
        )
        self._sweep = self._progress.add_task("levels measured", total=total_levels)
        self._now = self._progress.add_task("", total=None, visible=False)
        self._start = time.monotonic()
        self._what, self._next_sign_of_life = "", _SIGN_OF_LIFE_S

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self._start:7.1f} s] {text}"
        self._progress.console.print(line, markup=False, soft_wrap=True)

    def begin(self, what: str, total: int | None = None) -> None:
        self._what, self._next_sign_of_life = what, _SIGN_OF_LIFE_S
        self._progress.reset(self._now, description=what, total=total, visible=True)

    def still_waiting(self, seconds: float) -> None:
        """Called often while what began takes its time: a line now and then where no bar moves."""
        if not self._live and seconds >= self._next_sign_of_life:
            self.say(f"{self._what}, {seconds:.0f} s so far")
            self._next_sign_of_life += _SIGN_OF_LIFE_S

    def advance(self) -> None:
        self._progress.advance(self._now)

    def level_done(self) -> None:
        self._progress.advance(self._sweep)
