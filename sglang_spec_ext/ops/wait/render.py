"""What the operator sees: a table that is redrawn on a terminal, plain lines in a pipe."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from sglang_spec_ext.ops.wait.boot import BootState, Outcome, Span, Verdict

HEARTBEAT = 30.0  # seconds between plain lines when nothing happens
NARROW = 60  # columns
_COLOURS = {
    Outcome.READY: "green",
    Outcome.CRASHED: "red",
    Outcome.HUNG: "red",
    Outcome.TIMED_OUT: "yellow",
    Outcome.STOPPED: "yellow",
}


class PlainView:
    """One line per event, for pipes, logs of CI systems and `--json`."""

    def __init__(self, console: Console, boot: BootState) -> None:
        self._console = console
        self._boot = boot
        self._told: set[str] = set()
        self._boots = 0
        self._spoke_at = -1e9
        self._spoken = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, now: float) -> None:
        boot = self._boot
        if boot.boots > self._boots:
            if self._boots:
                self._say(now, "a new boot begins in the same log")
                self._told.clear()
            self._boots = boot.boots
        for span in boot.spans:
            if span.end is not None and span.phase.value not in self._told:
                self._told.add(span.phase.value)
                self._say(now, f"{span.phase.value}: {_seconds(span.seconds(now))}")
        for note in boot.notes.values():
            if note not in self._told:
                self._told.add(note)
                self._say(now, f"note: {note}")
        current = _current(boot, now)
        if now - self._spoke_at >= HEARTBEAT or (
            boot.phase.value not in self._told and self._spoken != boot.phase.value
        ):
            self._spoken = boot.phase.value
            self._say(now, f"{current}{_left(boot, now)}")

    def _say(self, now: float, words: str) -> None:
        self._spoke_at = now
        since = _seconds(now - self._boot.begin)
        self._console.print(f"[{since}] {words}", markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """The phases with marks, times and bars, redrawn in place; narrow terminals get less."""

    def __init__(self, console: Console, boot: BootState) -> None:
        self._console = console
        self._boot = boot
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, now: float) -> None:
        self._live.update(self._draw(now))

    def _draw(self, now: float) -> Group:
        boot = self._boot
        wide = self._console.width >= NARROW
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2)
        table.add_column(ratio=None if wide else 1, overflow="ellipsis", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        if wide:
            table.add_column(width=14)
            table.add_column(overflow="ellipsis", no_wrap=True)
        for span in boot.spans:
            mark: Any = Text("ok", "green") if span.end is not None else Spinner("dots")
            row: list[Any] = [mark, span.phase.value, _seconds(span.seconds(now))]
            if wide:
                row += [_bar(span), _detail(boot, span)]
            table.add_row(*row)
        lines: list[Any] = [table]
        current = boot.spans[-1]
        if not wide and _detail(boot, current):
            lines.append(Text(_detail(boot, current), overflow="fold"))
        lines += [Text(f"! {note}", "yellow", overflow="fold") for note in boot.notes.values()]
        if boot.slow(now):
            lines.append(Text(f"slow but alive: {boot.slow(now)}", "cyan", overflow="fold"))
        lines.append(Text(f"{_seconds(now - boot.begin)} since the start{_left(boot, now)}", "dim"))
        return Group(*lines)


def print_verdict(console: Console, verdict: Verdict, seconds: float) -> None:
    """The last words: what, where, why, and what to do."""
    rank = f" [{verdict.rank}]" if verdict.rank else ""
    head = f"{verdict.outcome.value.upper()} after {_seconds(seconds)}"
    if verdict.outcome is not Outcome.READY:
        head += f" in phase '{verdict.phase.value}'{rank}"
    console.print(Text(f"{head}: {verdict.reason}", _COLOURS[verdict.outcome]), soft_wrap=True)
    if verdict.hint:
        console.print(Text(f"what to do: {verdict.hint}"), soft_wrap=True)
    for line in verdict.evidence if verdict.outcome is not Outcome.READY else ():
        console.print(Text(f"  | {line}", "dim"), soft_wrap=True)


def as_json(boot: BootState, verdict: Verdict, exit_code: int, now: float) -> dict[str, Any]:
    """The verdict for programs. Times in seconds; ``null`` where a thing is unknown."""
    return {
        "outcome": verdict.outcome.value,
        "exit_code": exit_code,
        "phase": verdict.phase.value,
        "reason": verdict.reason,
        "rank": verdict.rank or None,
        "hint": verdict.hint or None,
        "evidence": list(verdict.evidence),
        "elapsed": round(now - boot.begin, 1),
        "boots_in_log": boot.boots,
        "ranks": boot.rank_count or None,
        "phases": [
            {
                "phase": span.phase.value,
                "seconds": round(span.seconds(now), 1),
                "ranks_done": len(span.ranks) or None,
                "done": span.done if span.total else None,
                "total": span.total or None,
            }
            for span in boot.spans
        ],
        "notes": list(boot.notes.values()),
    }


def _current(boot: BootState, now: float) -> str:
    span = boot.spans[-1]
    words = f"{span.phase.value} ..."
    detail = _detail(boot, span)
    words += f" {detail}" if detail else ""
    return words + (f"; slow but alive: {boot.slow(now)}" if boot.slow(now) else "")


def _detail(boot: BootState, span: Span) -> str:
    parts = []
    if span.total:
        parts.append(f"{span.done}/{span.total}")
    if boot.rank_count > 1 and span.ranks:
        parts.append(f"{len(span.ranks)} of {boot.rank_count} ranks")
    if span.end is None and boot.compiling:
        parts.append(boot.compiling)
    if span.end is None and boot.health not in ("", "ok", "refused"):
        parts.append(f"health: {boot.health}")
    return ", ".join(parts)


def _bar(span: Span) -> Any:
    return ProgressBar(total=span.total, completed=span.done, width=14) if span.total else ""


def _left(boot: BootState, now: float) -> str:
    left = boot.remaining(now)
    return "" if left is None else f", about {_seconds(left)} to go by earlier boots"


def _seconds(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02d}"
