"""Which of many reports of a failure is the first cause.

When one rank fails, all others fail too, with other words and within the same second, and the last
line of the log is the launcher's, which knows nothing. So every report is kept, echoes are told
from causes, and the oldest cause wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_spec_ext.ops.wait.patterns import (
    ECHO_EXCEPTION,
    HANDLED_TRACEBACK,
    TRACEBACK_HEAD,
    Kind,
    hint_for,
)
from sglang_spec_ext.ops.wait.reader import Record

STOPPED_CODES = (-15, 143)  # SIGTERM: somebody stopped it


@dataclass(frozen=True)
class Failure:
    """One process's report of an end.

    ``echo``: the cause is elsewhere. ``hung``: a watchdog found a step that does not end.
    ``old``: the line was in the log before we came. Times in seconds on the caller's clock.
    """

    at: float
    rank: str
    what: str
    cause: str = ""
    block: str = ""
    echo: bool = False
    hung: bool = False
    stopped: bool = False
    old: bool = False

    @property
    def reason(self) -> str:
        return self.cause or self.what


class FailureBook:
    """All reports of failures of one boot."""

    def __init__(self) -> None:
        self.reports: list[Failure] = []  # each of them ends the boot
        self.tracebacks: list[Failure] = []  # unexplained; they end it only if the process ends

    def add(self, record: Record, at: float, old: bool) -> None:
        """Take a record of one of the kinds that report an end and that is not `handled`."""
        kind, named = record.pattern.kind, record.match.groupdict()
        cause = _original(record.exceptions) if record.exceptions else named.get("cause") or ""
        code = int(named["code"]) if named.get("code") else None
        if kind is Kind.ENDED:
            who = named.get("who") or "a scheduler process"
            cause = f"{who} ended with exit code {code}"
            if code in STOPPED_CODES:
                cause += ": somebody stopped it (SIGTERM)"
        failure = Failure(
            at=at,
            rank=record.rank or (f"rank {named['number']}" if named.get("number") else ""),
            what=record.message.removesuffix(TRACEBACK_HEAD).strip(" :"),
            cause=cause,
            block=record.block,
            echo=kind in (Kind.ECHO, Kind.ENDED) or bool(ECHO_EXCEPTION.search(cause)),
            hung=kind is Kind.HUNG,
            stopped=code in STOPPED_CODES,
            old=old,
        )
        if kind is not Kind.TRACEBACK:
            self.reports.append(failure)
        else:
            self.tracebacks.append(failure)

    def progress(self) -> None:
        """The boot has moved on: tracebacks so far were survived."""
        self.tracebacks = []

    def first_cause(self) -> Failure | None:
        """The oldest report that is no echo, else the oldest unexplained traceback, else any."""
        for candidates in (
            [failure for failure in self.reports if not failure.echo],
            [failure for failure in self.tracebacks if not failure.echo],
            self.reports,
            self.tracebacks,
        ):
            if candidates:
                return min(candidates, key=lambda failure: failure.at)
        return None

    def hint(self, first: Failure) -> str:
        """Advice for the first cause, or for anything else that was said."""
        others = [failure.reason for failure in self.reports]
        texts = [first.cause, f"{first.what}\n{first.block}", "\n".join(others)]
        return next((hint for text in texts if (hint := hint_for(text))), "")


def handled(record: Record) -> bool:
    """Whether SGLang wrote this traceback only to tell that it goes on."""
    return record.pattern.kind is Kind.TRACEBACK and bool(HANDLED_TRACEBACK.match(record.message))


def _original(exceptions: tuple[str, ...]) -> str:
    """The first of a chain of exceptions that is not just an echo."""
    return next((text for text in exceptions if not ECHO_EXCEPTION.search(text)), exceptions[0])
