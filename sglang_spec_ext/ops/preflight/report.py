"""Findings and the canonical command line, for people and for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_spec_ext.ops.check_draft.finding import Finding, Severity, exit_code
from sglang_spec_ext.ops.preflight.command_line import Command
from sglang_spec_ext.ops.preflight.reading import Reading
from sglang_spec_ext.ops.wait.masking import mask

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "dim"}


def canonical(command: Command, reading: Reading, own: Sequence[str] = ()) -> str:
    """The command as one line with full flag names, known renames applied, secrets masked.

    What a --config file gives stands there as flags. ``own`` are arguments of the launcher itself.
    """
    assignments = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    words = [*command.launcher, *own]
    for written in reading.canonical.values():
        words += written
    return mask(" ".join([*assignments, shlex.join(words)]))


def print_report(console: Console, findings: list[Finding], origin: str, line: str) -> None:
    console.print(Text(f"judged by {origin}", "dim"), soft_wrap=True)
    for finding in findings:
        text = Text()
        text.append(f"{finding.severity.word:<8}", _COLOURS[finding.severity])
        text.append(mask(finding.message))
        if finding.fix:
            text.append(f"\n        -> {mask(finding.fix)}")
        console.print(text, soft_wrap=not console.is_terminal)
    counts = [sum(f.severity is s for f in findings) for s in (Severity.ERROR, Severity.WARNING)]
    console.print(Text(f"{counts[0]} errors, {counts[1]} warnings"))
    console.print(Text(line), soft_wrap=True)


def as_json(findings: list[Finding], reading: Reading, origin: str, line: str) -> dict[str, Any]:
    return {
        "exit_code": exit_code(findings),
        "sglang": reading.table.release,
        "judged_by": origin,
        "command": line,
        "findings": [
            {
                "id": finding.id,
                "severity": finding.severity.word,
                "message": mask(finding.message),
                "fix": mask(finding.fix) or None,
            }
            for finding in findings
        ],
    }
