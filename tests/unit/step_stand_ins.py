"""Stand-ins for what the target-only steps of both workers meet."""

from __future__ import annotations

import enum
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the step works on tensors")


class ForwardMode(enum.Enum):
    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"
    IDLE = "idle"

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_extend(self) -> bool:
        return self is ForwardMode.EXTEND


class CaptureHiddenMode(enum.Enum):
    NULL = 0
    FULL = 2


class Writer:
    """Stands for DraftKVWriter: remembers what it was asked to write."""

    reason: str | None = None
    hidden_width: int
    hidden_dtype = torch.float32

    def __init__(self, runner: Any) -> None:
        self.written: list[tuple[Any, ...]] = []

    @classmethod
    def why_not(cls, runner: Any) -> str | None:
        return cls.reason

    def write(self, tokens: Any, hidden: Any, positions: Any, slots: Any) -> None:
        self.written.append(tuple(x.clone() for x in (tokens, hidden, positions, slots)))


def written(step: Any) -> list[tuple[Any, ...]]:
    """Arguments of each write so far, after all that waited was written."""
    step._warm_draft.catch_up()
    calls: list[tuple[Any, ...]] = step._warm_draft._writer.written
    return calls


def last_hidden(step: Any, *pool_indices: int) -> Any:
    return step._warm_draft.last_hidden(torch.tensor(pool_indices))
