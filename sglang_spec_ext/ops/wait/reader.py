"""Bytes of a server log in, records out. No I/O, no clock.

A log of hundreds of megabytes must cost little: blocks of bytes are searched for a handful of
literals (a memory-bandwidth job), and only lines that hold one are decoded and matched. Lines of a
traceback are the exception: they are read one by one until the exception's last line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone

from sglang_spec_ext.ops.wait.patterns import (
    ANCHORS,
    ANCHORS_AFTER_READY,
    ROUTINE_KIND,
    ROUTINE_LINE,
    TRACEBACK_HEAD,
    Kind,
    LinePattern,
    classify,
)

MAX_LINE = 1 << 20  # bytes kept of a line that never ends, for example a core of binary rubbish
MAX_BLOCK = 400  # lines of one traceback
MAX_TRACEBACKS = 200  # per boot; what is behind hundreds of tracebacks explains nothing
LAST_LINES = 12
RECENT = 1 << 16  # bytes of a block in which the newest lines are looked for

# What supervisors put before a line, outermost first. Order matters, several can be nested.
_TRANSPORTS = (
    re.compile(r"\[pod/[^\]]+\] "),  # kubectl logs --prefix
    re.compile(r"[\w.-]+ +\| "),  # docker compose
    re.compile(r"(?P<iso>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?) "),
    re.compile(r"(?:stdout|stderr) [FP] "),  # CRI, behind its time
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d "),  # journald, syslog
    re.compile(r"[\w.-]+ [\w.@/-]+\[\d+\]: "),  # host and unit, behind the time
    re.compile(r"\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) "),  # Ray
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PREFIX = re.compile(
    r"\[(?P<date>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)(?P<ranks>(?: [A-Z_]+\d+)*)\] ?"
)
_GLUED = re.compile(r"(?<=.)(?=\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]{0,40}\] )")
_SHORT_RANKS = re.compile(r"\[(?P<ranks>(?:DP|PP|TP|EP)\d+(?: (?:DP|PP|TP|EP)\d+)*)\] ")
_TORCH_RANK = re.compile(r"\[rank(?P<number>\d+)\]:? ?")
_VLLM_STYLE = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \S+:\d+\] ")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:$|$)")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_LIVE_BAR = re.compile(rb"(?:Completed \| |%\|[^|]*\| *)\d+/\d+ [^\r\n]*$")


@dataclass(frozen=True)
class Record:
    """One message of the log.

    ``rank`` is like ``TP3`` or ``DP0 TP1``; empty where the line names none. ``stamp`` is the time
    on the log's own clock in seconds: only differences mean something. ``exceptions`` are the
    messages of a traceback that follows, the original one first; ``block`` is its text.
    """

    message: str
    rank: str
    stamp: float | None
    pattern: LinePattern
    match: re.Match[str]
    exceptions: tuple[str, ...] = ()
    block: str = ""


@dataclass
class Growth:
    """What the log has gained since the last look."""

    lines: int = 0  # kinds of lines that are not routine: a sign of life
    batches: bool = False  # decode batches: the scheduler works


@dataclass(frozen=True)
class _Line:
    """One line without its prefixes."""

    message: str
    rank: str = ""
    stamp: float | None = None
    dated: bool = False


@dataclass
class _Traceback:
    """A traceback that is being read."""

    heading: _Line
    pattern: LinePattern
    match: re.Match[str]
    lines: list[str] = field(default_factory=list)
    exceptions: list[str] = field(default_factory=list)
    in_frames: bool = True  # else behind an exception's message

    def add(self, line: str) -> bool:
        """Take one more line; False when the traceback was over before it."""
        if len(self.lines) >= MAX_BLOCK:
            return False
        if line in _CHAINED or line.startswith(TRACEBACK_HEAD):
            self.in_frames = True
        elif self.in_frames:
            if _EXCEPTION.match(line):
                self.exceptions.append(line)
                self.in_frames = False
        elif line.strip() and not self.lines[-1].strip():
            return False
        self.lines.append(line)
        return True


class LogReader:
    """Turns the bytes of one log, in pieces of any size, into records."""

    def __init__(self) -> None:
        self.lines_examined = 0  # decoded and matched; the rest was only searched
        self._tail = b""
        self._previous = b""
        self._open: _Traceback | None = None
        self._tracebacks = 0
        self._anchors = ANCHORS
        self._growth = Growth()
        self._last = b""

    def feed(self, data: bytes) -> list[Record]:
        """Records that are complete with ``data``; a bar that is being drawn counts at once."""
        data = (self._tail + data).replace(b"\r", b"\n")
        cut = data.rfind(b"\n") + 1
        self._tail = data[cut:]
        records = list(self._read(data[:cut])) if cut else []
        if len(self._tail) > MAX_LINE:
            self._tail = self._tail[: MAX_LINE // 2]
        if _LIVE_BAR.search(self._tail[-400:]):
            records += [
                record
                for line in self._lines(self._tail)
                for record in self._records(line)
                if record.pattern.kind is Kind.BAR
            ]
        return records

    def settle(self) -> list[Record]:
        """The record that waited for more lines; call when the log is quiet for a moment."""
        return list(self._close())

    def finish(self) -> list[Record]:
        """Everything left, the unfinished last line included; call when nothing more can come."""
        records = self.feed(b"\n") if self._tail else []
        return records + self.settle()

    def take_growth(self) -> Growth:
        """What came since the last call."""
        growth, self._growth = self._growth, Growth()
        return growth

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The newest lines that are not routine."""
        text = _clean(self._last + b"\n" + self._tail)
        return [line.rstrip() for line in text.split("\n") if line.strip()][-count:]

    def _read(self, chunk: bytes) -> Iterator[Record]:
        news = self._news(chunk)
        if not news:
            return
        position = 0
        hits: list[tuple[int, int]] | None = None
        while True:
            if self._open is not None:
                position = yield from self._continue(chunk, position)
                if self._open is not None:
                    break
            if hits is None:
                anchors = self._anchors
                hits = self._hits(chunk, position, [each for each in anchors if each in news])
            while hits and hits[-1][0] < position:
                hits.pop()
            if not hits:
                break
            start, end = hits.pop()
            position = end + 1
            if start:
                self._previous = chunk[_line_start(chunk, start - 1) : start - 1]
            for line in self._lines(chunk[start:end]):
                yield from self._records(line)
            if anchors is not self._anchors:
                hits = None
        recent = ROUTINE_LINE.sub(b"", b"\n" + chunk[-RECENT:]).rstrip(b"\n")
        self._previous = recent[recent.rfind(b"\n") + 1 :][-4096:]
        self._last = (self._last + recent[-4096:])[-4096:]

    def _news(self, chunk: bytes) -> bytes:
        """One of each kind of line that is not routine.

        Lines that differ in digits only are one kind, so that a flood costs no more than one line
        of it in everything that follows.
        """
        kinds = set(chunk.translate(None, b"0123456789").split(b"\n"))
        news = [kind for kind in kinds if kind and not ROUTINE_KIND.match(kind)]
        self._growth.lines += len(news)
        self._growth.batches |= any(b"Decode batch" in kind for kind in kinds)
        return b"\n".join(news)

    def _hits(self, chunk: bytes, position: int, anchors: list[bytes]) -> list[tuple[int, int]]:
        """Start and end of every line from ``position`` on that holds an anchor, last one first."""
        lines: dict[int, int] = {}
        for anchor in anchors:
            at = chunk.find(anchor, position)
            while at >= 0:
                end = chunk.find(b"\n", at)
                lines[_line_start(chunk, at)] = end
                at = chunk.find(anchor, end)
        return sorted(lines.items(), reverse=True)

    def _lines(self, raw: bytes) -> Iterator[_Line]:
        """The records of one line: a progress bar has no end, so the next record sticks to it."""
        self.lines_examined += 1
        for text in _transported(_clean(raw)):
            for piece in _GLUED.split(text):
                yield _parse(piece)

    def _records(self, line: _Line) -> Iterator[Record]:
        found = classify(line.message)
        if found is None:
            return
        pattern, match = found
        if pattern.kind in (Kind.ARGS, Kind.BOOT):
            self._anchors = ANCHORS
            self._tracebacks = 0
        elif pattern.kind is Kind.READY:
            self._anchors = ANCHORS_AFTER_READY
        if TRACEBACK_HEAD in line.message and pattern.kind in (Kind.TRACEBACK, Kind.FAILED):
            yield from self._close()
            self._tracebacks += 1
            if pattern.kind is Kind.FAILED or self._tracebacks <= MAX_TRACEBACKS:
                heading = line if pattern.kind is Kind.FAILED else self._heading()
                self._open = _Traceback(heading, pattern, match, [line.message])
            return
        if pattern.kind is Kind.SYMPTOM:
            self._growth.lines -= 1  # a server that only complains does not move on
        yield Record(line.message, line.rank, line.stamp, pattern, match)

    def _heading(self) -> _Line:
        """The line above a bare traceback, which may say whose it is."""
        return _parse(_transported(_clean(self._previous))[-1])

    def _continue(self, chunk: bytes, position: int) -> Generator[Record, None, int]:
        """Feed the open traceback from ``position``; the position behind what it took."""
        while self._open is not None and position < len(chunk):
            end = chunk.find(b"\n", position)
            for line in self._lines(chunk[position:end]):
                if line.dated and self._open is not None and self._open.in_frames:
                    # Another process wrote in between; two tracebacks cannot be told apart.
                    if TRACEBACK_HEAD not in line.message:
                        yield from self._records(line)
                        continue
                    yield from self._close()
                if self._open is None or line.dated or not self._open.add(line.message):
                    yield from self._close()
                    return position
                if line.message and not line.message[0].isspace():
                    found = classify(line.message)
                    if found is not None and found[0].kind is not Kind.TRACEBACK:
                        yield from self._records(line)
            position = end + 1
        return position

    def _close(self) -> Iterator[Record]:
        if self._open is None:
            return
        done, self._open = self._open, None
        yield Record(
            done.heading.message,
            done.heading.rank,
            done.heading.stamp,
            done.pattern,
            done.match,
            tuple(done.exceptions),
            "\n".join(done.lines).rstrip(),
        )


def _line_start(data: bytes, at: int) -> int:
    return data.rfind(b"\n", 0, at) + 1


def _clean(raw: bytes) -> str:
    text = raw.decode("utf-8", errors="replace").replace("\0", "")
    return _ANSI.sub("", text) if "\x1b" in text else text


def _transported(text: str) -> list[str]:
    """The line as SGLang wrote it, plus, for Docker's JSON files, the parts of a redrawn bar."""
    if text.startswith('{"log":'):
        try:
            written = json.loads(text)["log"]
        except (ValueError, KeyError, TypeError):
            return [text]
        return [part for part in re.split(r"[\r\n]", str(written)) if part] or [""]
    return [text]


def _parse(text: str) -> _Line:
    stamp: float | None = None
    for transport in _TRANSPORTS:
        found = transport.match(text)
        if found is not None:
            text = text[found.end() :]
            iso = found.groupdict().get("iso")
            stamp = _seconds(iso) if iso else stamp
    found = _PREFIX.match(text)
    if found is not None:
        own = _seconds(found["date"])
        return _Line(text[found.end() :], _rank(found["ranks"]), own if own else stamp, True)
    found = _SHORT_RANKS.match(text)
    if found is not None:
        return _Line(text[found.end() :], _rank(found["ranks"]), stamp, True)
    found = _TORCH_RANK.match(text)
    if found is not None:
        return _Line(text[found.end() :], f"rank {found['number']}", stamp, True)
    found = _VLLM_STYLE.match(text)
    if found is not None:
        return _Line(text[found.end() :], "", stamp, True)
    return _Line(text, "", stamp, False)


def _rank(ranks: str) -> str:
    """The parts of SGLang's prefix that tell one scheduler process from another."""
    return " ".join(part for part in ranks.split() if part.startswith(("DP", "PP", "TP")))


def _seconds(date: str) -> float | None:
    try:
        moment = datetime.fromisoformat(date.replace(",", ".").replace("Z", "+00:00"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        # No zone given: any fixed one will do, only differences are used.
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp()
