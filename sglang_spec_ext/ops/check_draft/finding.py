"""What a check has found, in the form that both the report and the converter read."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from sglang_spec_ext.compat.releases import RELEASES
from sglang_spec_ext.ops.check_draft.edits import Edit


class Severity(enum.IntEnum):
    """How bad it is; the values order the report."""

    ERROR = 0
    WARNING = 1
    NOTE = 2

    @property
    def word(self) -> str:
        return self.name.lower()


class FixBy(enum.Enum):
    """Who can put it right."""

    CONVERT = "convert"  # `check-draft --convert` does it
    SERVER = "server"  # other arguments for the server, or another SGLang release
    AUTHOR = "author"  # another checkpoint, or an edit that needs knowledge we do not have
    NOBODY = "nobody"  # nothing is wrong


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``releases`` are the SGLang releases for which it holds. ``edits`` is what a conversion would
    do about it; empty unless ``fix_by`` is CONVERT.
    """

    id: str
    severity: Severity
    message: str
    fix: str = ""
    fix_by: FixBy = FixBy.NOBODY
    releases: tuple[str, ...] = RELEASES
    edits: tuple[Edit, ...] = field(default=(), repr=False)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "severity": self.severity.word,
            "message": self.message,
            "fix": self.fix,
            "fix_by": self.fix_by.value,
            "releases": list(self.releases),
        }


def exit_code(findings: list[Finding]) -> int:
    """0 when there is nothing worse than a note, 1 for warnings, 2 for errors."""
    worst = min((finding.severity for finding in findings), default=Severity.NOTE)
    return {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}[worst]
