"""Prints a report: rich tables on a terminal, plain columns in a pipe, Markdown on request."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from sglang_spec_ext.ops.bench.crossover import Recommendation
from sglang_spec_ext.ops.bench.report import (
    Table,
    boot_table,
    detail_table,
    measured_variants,
    remarks,
    throughput_table,
    worst_ratio,
)
from sglang_spec_ext.ops.bench.results import Results

# A pipe has no width; a table must not be cut there.
_PIPE_WIDTH = 400


def print_report(
    results: Results, recommendation: Recommendation, warnings: list[str], markdown: bool
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    write = _write_markdown if markdown else _write_table
    if measured_variants(results):
        write(console, throughput_table(results))
        write(console, detail_table(results))
    if (boots := boot_table(results)) is not None:
        write(console, boots)
    for title, lines in (
        ("Remarks", [*warnings, *remarks(results)]),
        ("Against the better of on and off", worst_ratio(results)),
    ):
        _write_list(console, title, lines)
    _write_list(
        console,
        recommendation.headline,
        [*recommendation.reasons, *(f"-> {advice}" for advice in recommendation.advice)],
        always=True,
    )


def _write_list(console: Console, title: str, lines: list[str], always: bool = False) -> None:
    if not lines and not always:
        return
    console.print(f"{title[:1].upper()}{title[1:]}", style="bold", markup=False, soft_wrap=True)
    for line in lines:
        console.print(f"- {line}", markup=False, soft_wrap=True)
    console.print()


def _write_table(console: Console, table: Table) -> None:
    box = SIMPLE_HEAD if console.is_terminal else None
    shown = RichTable(box=box, pad_edge=False)
    for column in table.columns:
        is_name = column == "variant"
        shown.add_column(
            column.replace(" ", "\n", 1), justify="left" if is_name else "right", no_wrap=True
        )
    for row in table.rows:
        shown.add_row(*row)
    console.print(table.title, style="bold", markup=False)
    console.print(shown)
    if table.caption:
        console.print(table.caption, style="dim", markup=False, soft_wrap=True)
    console.print()


def _write_markdown(console: Console, table: Table) -> None:
    rule = ["---:" if column != "variant" else "---" for column in table.columns]
    lines = [table.columns, rule, *table.rows]
    console.print(
        f"**{table.title}** ({table.caption})" if table.caption else f"**{table.title}**",
        markup=False,
        soft_wrap=True,
    )
    console.print()
    for line in lines:
        console.print(f"| {' | '.join(line)} |", markup=False, soft_wrap=True)
    console.print()
