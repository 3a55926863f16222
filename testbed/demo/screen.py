"""The table, live on a terminal; lines in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from testbed.demo.verdict import Check, Row


class Screen:
    """Shows rows while they grow (as a context manager), and everything that stays."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """A line that stays; long ones are not broken, so that they can be searched for."""
        self._console.print(Text(text, style), soft_wrap=True)

    def growing(self, rows: Sequence[Row]) -> None:
        """The table so far. A pipe gets none before the end."""
        if self._console.is_terminal:
            self._live.update(_table(rows), refresh=True)

    def row_done(self, row: Row) -> None:
        """A finished phase, for those who do not see the live table."""
        if not self._console.is_terminal:
            batch, mode, accept, rate = _cells(row)
            self.say(
                f"  {row.name}: batch {batch}, {mode}, accept length {accept}, {rate} tokens/s"
            )

    def result(self, rows: Sequence[Row], switches: Sequence[str], checks: Sequence[Check]) -> None:
        """The table, the switches' log lines and what held."""
        self._console.print()
        self._console.print(_table(rows))
        self._console.print()
        self.say("The switches, from the server's log:")
        for line in switches or ["none"]:
            self.say(f"  {line}")
        self._console.print()
        for check in checks:
            mark, style = ("ok    ", "green") if check.held else ("FAILED", "bold red")
            self._console.print(Text.assemble((mark, style), "  ", check.text), soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    table = Table("phase", "batch", "mode")
    for name in ("accept length", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.name, *_cells(row))
    return table


def _cells(row: Row) -> tuple[str, str, str, str]:
    most, last = row.batch
    return (
        str(most) if most == last else f"{most} to {last}",
        row.mode,
        "-" if row.accept_length is None else f"{row.accept_length:.2f}",
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
    )
