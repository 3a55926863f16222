"""Findings for people and for programs. Nothing secret is in them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_spec_ext.ops.check_draft.finding import Finding, Severity
from sglang_spec_ext.ops.wait.masking import mask

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "dim"}


def print_findings(console: Console, findings: list[Finding], *, with_ids: bool = False) -> None:
    """Each with its fix below it, then how many are errors and warnings."""
    for finding in findings:
        text = Text()
        text.append(f"{finding.severity.word:<8}", _COLOURS[finding.severity])
        text.append(f"{finding.id}: " if with_ids else "")
        text.append(mask(finding.message))
        if finding.fix:
            text.append(f"\n        -> {mask(finding.fix)}")
        console.print(text, soft_wrap=not console.is_terminal)
    counts = [sum(f.severity is s for f in findings) for s in (Severity.ERROR, Severity.WARNING)]
    console.print(Text(f"{counts[0]} errors, {counts[1]} warnings"))


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    return [
        {
            "id": finding.id,
            "severity": finding.severity.word,
            "message": mask(finding.message),
            "fix": mask(finding.fix) or None,
        }
        for finding in findings
    ]
