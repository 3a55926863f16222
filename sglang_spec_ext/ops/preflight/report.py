"""Findings and the canonical command line, for people and for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_spec_ext.ops.check_draft.finding import Finding, exit_code
from sglang_spec_ext.ops.findings import as_json as findings_as_json
from sglang_spec_ext.ops.findings import print_findings
from sglang_spec_ext.ops.preflight.command_line import Command
from sglang_spec_ext.ops.preflight.reading import Reading
from sglang_spec_ext.ops.wait.masking import mask


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
    print_findings(console, findings)
    console.print(Text(line), soft_wrap=True)


def as_json(findings: list[Finding], reading: Reading, origin: str, line: str) -> dict[str, Any]:
    return {
        "exit_code": exit_code(findings),
        "sglang": reading.table.release,
        "judged_by": origin,
        "command": line,
        "findings": findings_as_json(findings),
    }
