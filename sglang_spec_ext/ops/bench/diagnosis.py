"""Why a server died, in one line, by the log reader of ``sglang-spec-ext wait``."""

from __future__ import annotations

from sglang_spec_ext.ops.wait.failures import FailureBook
from sglang_spec_ext.ops.wait.masking import mask
from sglang_spec_ext.ops.wait.patterns import Kind
from sglang_spec_ext.ops.wait.reader import LogReader

_ENDS = (Kind.FAILED, Kind.ECHO, Kind.ENDED, Kind.HUNG, Kind.TRACEBACK)


def first_cause(log: bytes) -> str:
    """The first cause that the log names, with advice where there is some; else its last lines."""
    reader = LogReader()
    book = FailureBook()
    for position, record in enumerate([*reader.feed(log), *reader.finish()]):
        if record.pattern.kind in _ENDS:
            book.add(record, at=position, old=False)
    first = book.first_cause()
    if first is None:
        return mask("; ".join(reader.last_lines(3))) or "its log is empty"
    hint = book.hint(first)
    return mask(f"{first.reason} [{hint}]" if hint else first.reason)
