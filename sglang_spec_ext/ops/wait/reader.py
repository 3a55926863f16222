"""Bytes of a server log in, records out. No I/O, no clock.

A log of hundreds of megabytes must cost little: blocks of bytes are searched for a handful of
literals (a memory-bandwidth job), and only lines that hold one are decoded and matched. Blocks of
lines that differ in digits only are searched once for all of them. Lines of a traceback are the
exception: they are read one by one until the exception's last line.
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
    IN_NO_ANCHOR,
    NEWEST_COUNTS,
    ROUTINE_KIND,
    ROUTINE_LINE,
    SYMPTOMS,
    TRACEBACK_ANCHOR,
    TRACEBACK_HEAD,
    USERS_TEXT,
    Kind,
    LinePattern,
    classify,
    scouted,
)

MAX_LINE = 1 << 20  # bytes kept of a line that never ends, for example a core of binary rubbish
MAX_BLOCK = 400  # lines of one traceback
MAX_TRACEBACKS = 200  # per boot; what is behind hundreds of tracebacks explains nothing
MAX_IN_A_ROW = 400  # bars, kernels and complaints in a row; of more only the newest are read
LAST_LINES = 12
KEPT = 4096  # bytes of the newest lines that are not routine
RECENT = 500  # lines among which they are looked for
BLOCK = 1 << 17  # bytes that are searched at a time: they stay in the processor's cache
SAMPLE = 1 << 11  # bytes of a block that tell whether its lines differ in digits only
DIGITS = b"0123456789"

# What supervisors put before a line, outermost first. Order matters, several can be nested.
_TRANSPORTS = (
    re.compile(r"\[pod/[^\]]+\] "),  # kubectl logs --prefix
    re.compile(r"[\w.@-]+ +\| "),  # docker compose, docker service
    re.compile(r"(?P<iso>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?) "),
    re.compile(r"(?:stdout|stderr) [FP] "),  # CRI, behind its time
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? "),  # journald, syslog
    re.compile(r"[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \w+ "),  # with-unit
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

    news: bool = False  # lines that are neither routine nor a complaint: a sign of life
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
        self.bytes_split = 0  # into lines, to find out that they differ in digits only
        self._tail = b""
        self._previous = b""  # the last line of the piece before that is not routine
        self._hit: tuple[bytes, int] = (b"", 0)  # where the line begins that is looked at
        self._open: _Traceback | None = None
        self._tracebacks = 0
        self._in_a_row = 0
        self._anchors = ANCHORS
        self._scouts = scouted(ANCHORS)
        self._growth = Growth()
        self._unusual = False  # whether this piece holds lines that are not routine
        self._last = b""

    def feed(self, data: bytes) -> list[Record]:
        """Records that are complete with ``data``; a bar that is being drawn counts at once."""
        data = (self._tail + data).replace(b"\r", b"\n")
        cut = data.rfind(b"\n") + 1
        self._tail = data[cut:]
        records = list(self._read(data, cut)) if cut else []
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

    def _read(self, data: bytes, end: int) -> Iterator[Record]:
        """The whole lines ``data[:end]``."""
        position = 0
        self._unusual = self._open is not None
        while position < end:
            if self._open is not None:
                position = yield from self._continue(data, position, end)
            if position < end:
                stop = data.find(b"\n", min(position + BLOCK, end - 1)) + 1
                position = yield from self._read_block(data, position, stop, end)
        if self._unusual:
            recent = _newest(data, end)
            self._previous = _last_line(recent) or self._previous
            self._last = (self._last + recent)[-KEPT:]
        self._hit = (b"", 0)

    def _read_block(
        self, data: bytes, position: int, stop: int, end: int
    ) -> Generator[Record, None, int]:
        """The lines from ``position`` to ``stop``; the position behind all that was read.

        It is beyond ``stop`` where a traceback goes on, and before it where other anchors count
        from there on.
        """
        anchors, present = self._anchors, self._present(data, position, stop)
        hits = self._hits(data, position, stop, present)
        while hits:
            start, line_end = hits.pop()
            if start < position:
                continue
            position = line_end + 1
            self._hit = (data, start)
            for line in self._lines(data[start:line_end]):
                yield from self._records(line)
            if anchors is not self._anchors:
                return position
            if self._open is not None:
                position = yield from self._continue(data, position, end)
        return max(position, stop)

    def _present(self, data: bytes, begin: int, end: int) -> list[bytes]:
        """The anchors that the block holds; also notes whether the log has gained anything.

        Lines that differ in digits only are one kind. A flood of few kinds is searched once for
        all lines of a kind; where every line is another, finding that out would cost more than
        the search. Binary rubbish is searched without the bytes that no anchor has, most of it.
        """
        sample = data[begin : min(begin + SAMPLE, end)]
        news = _not_routine(_kinds(sample))
        if sum(map(len, news)) > SAMPLE // 2:
            self._unusual = True
            self._growth.news |= any(map(_moves_on, news))
            self._growth.batches |= data.find(b"Decode batch", begin, end) >= 0
            if len(_in_anchors(sample)) < len(sample) // 2:
                text = _in_anchors(data[begin:end])
                return self._anchors_in(text, 0, len(text))
            return self._anchors_in(data, begin, end)
        self.bytes_split += end - begin
        kinds = _kinds(data[begin:end])
        news = _not_routine(kinds)
        self._unusual |= bool(news)
        self._growth.news |= any(map(_moves_on, news))
        self._growth.batches |= any(b"Decode batch" in kind for kind in kinds)
        text = b"\n".join(news)
        return self._anchors_in(text, 0, len(text))

    def _anchors_in(self, text: bytes, begin: int, end: int) -> list[bytes]:
        # One byte is found at once where it is common, and ruled out at the speed of memory.
        return [
            anchor
            for scout in self._scouts
            if text.find(scout.rare, begin, end) >= 0 and text.find(scout.literal, begin, end) >= 0
            for anchor in scout.anchors
            if text.find(anchor, begin, end) >= 0
        ]

    def _hits(
        self, data: bytes, begin: int, end: int, anchors: list[bytes]
    ) -> list[tuple[int, int]]:
        """Start and end of every line of the block that holds an anchor, last one first."""
        lines: dict[int, int] = {}
        for anchor in anchors:
            left = MAX_IN_A_ROW - self._in_a_row if anchor in NEWEST_COUNTS else end - begin
            at = data.find(anchor, begin, end)
            while at >= 0:
                if left <= 0:  # a flood: on to the newest
                    at = data.rfind(anchor, at, end)
                left -= 1
                line_end = data.find(b"\n", at)
                lines[_line_start(data, at)] = line_end
                at = data.find(anchor, line_end, end)
        return sorted(lines.items(), reverse=True)

    def _lines(self, raw: bytes) -> Iterator[_Line]:
        """The records of one line: a progress bar has no end, so the next record sticks to it."""
        self.lines_examined += 1
        for text in _transported(_clean(raw)):
            first, *others = _GLUED.split(text)
            line = _parse(first)
            yield line
            if not USERS_TEXT.match(line.message):
                yield from map(_parse, others)

    def _records(self, line: _Line) -> Iterator[Record]:
        found = classify(line.message)
        if found is None:
            return
        pattern, match = found
        self._in_a_row = self._in_a_row + 1 if pattern.anchor in NEWEST_COUNTS else 0
        if pattern.kind in (Kind.ARGS, Kind.BOOT):
            self._tracebacks = 0
            self._look_for(ANCHORS)
        elif pattern.kind is Kind.READY:
            self._look_for(ANCHORS_AFTER_READY)
        if TRACEBACK_HEAD in line.message and pattern.kind in (Kind.TRACEBACK, Kind.FAILED):
            yield from self._close()
            self._tracebacks += 1
            if pattern.kind is Kind.FAILED or self._tracebacks <= MAX_TRACEBACKS:
                heading = line if pattern.kind is Kind.FAILED else self._heading()
                self._open = _Traceback(heading, pattern, match, [line.message])
            else:
                self._look_for(tuple(each for each in self._anchors if each != TRACEBACK_ANCHOR))
            return
        yield Record(line.message, line.rank, line.stamp, pattern, match)

    def _look_for(self, anchors: tuple[bytes, ...]) -> None:
        if anchors != self._anchors:
            self._anchors, self._scouts = anchors, scouted(anchors)

    def _heading(self) -> _Line:
        """The line above a bare traceback, which may say whose it is."""
        above = _last_line(_newest(*self._hit)) or self._previous
        return _parse(_transported(_clean(above))[-1])

    def _continue(self, data: bytes, position: int, end: int) -> Generator[Record, None, int]:
        """Feed the open traceback from ``position``; the position behind what it took."""
        while self._open is not None and position < end:
            line_end = data.find(b"\n", position)
            for line in self._lines(data[position:line_end]):
                if line.dated and self._open is not None and self._open.in_frames:
                    # Another process wrote in between; two tracebacks cannot be told apart.
                    if TRACEBACK_HEAD not in line.message:
                        yield from self._records(line)
                        continue
                    yield from self._close()
                if self._open is None or line.dated or not self._open.add(line.message):
                    yield from self._close()
                    return position
                self._unusual = self._growth.news = True
                if line.message and not line.message[0].isspace():
                    found = classify(line.message)
                    if found is not None and found[0].kind is not Kind.TRACEBACK:
                        yield from self._records(line)
            position = line_end + 1
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


def _last_line(text: bytes) -> bytes:
    return text[text.rfind(b"\n") + 1 :]


def _kinds(block: bytes) -> set[bytes]:
    """Its lines without their digits, one of each kind."""
    return set(block.translate(None, DIGITS).split(b"\n"))


def _in_anchors(text: bytes) -> bytes:
    """Those of its bytes that some anchor has; all anchors that it holds are in there, too."""
    return text.translate(None, IN_NO_ANCHOR)


def _not_routine(kinds: set[bytes]) -> list[bytes]:
    return [kind for kind in kinds if kind and not ROUTINE_KIND.match(kind)]


def _moves_on(kind: bytes) -> bool:
    return not any(symptom in kind for symptom in SYMPTOMS)


def _newest(data: bytes, end: int) -> bytes:
    """The last of the lines ``data[:end]`` that are not routine, at most KEPT bytes of them."""
    lines: list[bytes] = []
    size = 0
    for _ in range(RECENT):
        if end == 0 or size >= KEPT:
            break
        start = _line_start(data, end - 1)
        line = data[start:end]
        if line != b"\n" and not ROUTINE_LINE.match(line):
            lines.append(line)
            size += len(line)
        end = start
    return b"".join(reversed(lines)).rstrip(b"\n")[-KEPT:]


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
