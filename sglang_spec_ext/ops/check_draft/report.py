"""The findings as lines for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from sglang_spec_ext.compat.releases import describe
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity, exit_code

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: None}


def lines(findings: list[Finding]) -> Iterator[str]:
    """One line per finding, then one that sums up. Styled; click strips that in a pipe."""
    width = max((len(finding.id) for finding in findings), default=0)
    for finding in findings:
        word = click.style(f"{finding.severity.word:<7}", fg=_COLOURS[finding.severity], bold=True)
        fix = f" -> {finding.fix}" if finding.fix else ""
        releases = describe(finding.releases)
        where = f" [SGLang {releases}]" if releases else ""
        yield f"{word} {finding.id:<{width}}  {finding.message}{fix}{where}"
    yield summary(findings)


def summary(findings: list[Finding]) -> str:
    counts = {
        severity: sum(finding.severity is severity for finding in findings)
        for severity in (Severity.ERROR, Severity.WARNING)
    }
    if not any(counts.values()):
        return "no errors, no warnings"
    parts = [f"{n} {s.word}{'' if n == 1 else 's'}" for s, n in counts.items() if n]
    return ", ".join(parts)


def as_json(draft: Path, target: Path | None, release: str | None, findings: list[Finding]) -> str:
    return json.dumps(
        {
            "draft": str(draft),
            "target": None if target is None else str(target),
            "sglang": release or "all",
            "exit_code": exit_code(findings),
            "findings": [finding.as_json() for finding in findings],
        },
        indent=2,
    )
