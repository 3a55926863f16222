"""What SGLang's log says about one level and one boot. Text in, figures out.

Formats seen from 0.5.9 to 0.5.23::

    [2026-05-02 10:00:00 TP0] Decode batch, #running-req: 8, #token: 1108, token usage: 0.00,
        accept len: 2.17, accept rate: 0.54, cuda graph: True, gen throughput (token/s): 178.86,
        #queue-req: 0

``accept len`` is absent without speculation and while target-only; the graph label is
``cuda graph``, ``cpu graph``, ``npu graph`` or ``musa graph`` by device; ``Decode batch. #running``
and an iteration number ``Decode batch [17], ...`` occur too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

_DECODE = re.compile(r"Decode batch(?: \[\d+\])?[.,] #running-req: (?P<running>\d+),(?P<rest>.*)")
_THROUGHPUT = re.compile(r"gen throughput \(token/s\): (\d+(?:\.\d+)?)")
_ACCEPT_LEN = re.compile(r"(?<!block )accept len: (\d+(?:\.\d+)?)")
_GRAPH = re.compile(r"\b(?P<backend>\w+) graph: (?P<used>True|False)")
_QUEUE = re.compile(r"#queue-req: (\d+)")
_DP_RANK = re.compile(r"\bDP(\d+)\b")
_PREFILL = re.compile(r"Prefill batch(?: \[\d+\])?[.,] #new-seq")
_RETRACT = re.compile(r"KV cache pool is full\. Retract requests\.")
_SWITCH = re.compile(r"spec-ext switch: \S+ -> \S+")
_ADAPTIVE_SWITCH = re.compile(r"Switch adaptive runtime state: ")
_ACTIVE = re.compile(r"spec-ext active: .*")
_CAPTURE_END = re.compile(
    r"Capture .*graph end\. (?:Time elapsed: |elapsed=)(?P<seconds>\d+(?:\.\d+)?) s[.,] "
    r".*?mem usage=(?P<gigabytes>-?\d+(?:\.\d+)?) GB",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LevelLog:
    """The server's own view of one measured level at concurrency C.

    tok_s: median decode throughput (tokens/s) of the lines that count, None without such lines.
    tok_s_clean: True if those lines cover pure decode: C requests running, no prefill between;
    False if they are all lines near C, prefill in between included.
    tok_s_lines: how many lines the median is over.
    accept_len: mean over the lines near C that speculated, None if none did.
    graph_backend, graph_share: e.g. "cuda", and the share of lines near C that ran on its graphs.
    running_max, at_level_share: most requests seen running; share of lines near C.
    queued: most requests seen waiting while others decoded.
    """

    tok_s: float | None = None
    tok_s_clean: bool = False
    tok_s_lines: int = 0
    accept_len: float | None = None
    graph_backend: str | None = None
    graph_share: float | None = None
    running_max: int | None = None
    at_level_share: float | None = None
    queued: int | None = None
    retractions: int = 0
    switches: int = 0
    adaptive_switches: int = 0
    note: str | None = None


@dataclass(frozen=True)
class _DecodeLine:
    running: int
    tok_s: float | None
    accept_len: float | None
    graph_backend: str | None
    on_graph: bool
    queued: int
    clean: bool


# A finished request's successor needs a moment to get in, so at high concurrency most lines show a
# few less than C. Below 21 requests this means exactly C.
_NEAR_LEVEL = 0.95

# Below this many pure decode lines a median says little, and every line near C is used instead.
_MIN_CLEAN_LINES = 3


def read_level(text: str, concurrency: int) -> LevelLog:
    """The log written while one level was measured -> its figures."""
    lines = _lines(text)
    events = LevelLog(
        retractions=_count(_RETRACT, lines),
        switches=_count(_SWITCH, lines),
        adaptive_switches=_count(_ADAPTIVE_SWITCH, lines),
    )
    if len(_data_parallel_ranks(lines)) > 1:
        note = "several data-parallel ranks log separately: no server-side figures"
        return replace(events, note=note)
    decodes = list(_decode_lines(lines, concurrency))
    if not decodes:
        return events
    at_level = [line for line in decodes if line.running > _NEAR_LEVEL * concurrency]
    clean = [line.tok_s for line in at_level if line.clean and line.tok_s is not None]
    every = [line.tok_s for line in at_level if line.tok_s is not None]
    is_clean = len(clean) >= _MIN_CLEAN_LINES
    throughputs = clean if is_clean else every
    accepts = [line.accept_len for line in at_level if line.accept_len is not None]
    graphs = [line for line in at_level if line.graph_backend is not None]
    return replace(
        events,
        tok_s=median(throughputs) if throughputs else None,
        tok_s_clean=is_clean,
        tok_s_lines=len(throughputs),
        accept_len=fmean(accepts) if accepts else None,
        graph_backend=graphs[0].graph_backend if graphs else None,
        graph_share=fmean(line.on_graph for line in graphs) if graphs else None,
        running_max=max(line.running for line in decodes),
        at_level_share=len(at_level) / len(decodes),
        queued=max(line.queued for line in decodes),
    )


def _decode_lines(lines: Sequence[str], concurrency: int) -> Iterable[_DecodeLine]:
    """A line reports the window since the line before, so only two neighbours at C with nothing
    between them describe a window in which exactly C requests decoded."""
    undisturbed = False
    for line in lines:
        if _PREFILL.search(line) or _SWITCH.search(line) or _RETRACT.search(line):
            undisturbed = False
            continue
        match = _DECODE.search(line)
        if match is None:
            continue
        running = int(match["running"])
        rest = match["rest"]
        graph = _GRAPH.search(rest)
        yield _DecodeLine(
            running=running,
            tok_s=_number(_THROUGHPUT, rest),
            accept_len=_number(_ACCEPT_LEN, rest),
            graph_backend=graph["backend"] if graph else None,
            on_graph=graph is not None and graph["used"] == "True",
            queued=int(_number(_QUEUE, rest) or 0),
            clean=undisturbed and running == concurrency,
        )
        undisturbed = running == concurrency


@dataclass(frozen=True)
class BootLog:
    """What a boot cost: seconds and GB of graph capture (None if no graph was captured), and our
    plugin's start line."""

    capture_s: float | None = None
    capture_gb: float | None = None
    plugin_line: str | None = None


def read_boot(text: str) -> BootLog:
    """The log from process start to readiness. Several ranks log each capture: rank 0 counts."""
    lines = [line for line in _lines(text) if not re.search(r"\b(?:TP|DP|PP)[1-9]\d*\b", line[:80])]
    captures = [match for line in lines if (match := _CAPTURE_END.search(line))]
    active = next((match[0] for line in lines if (match := _ACTIVE.search(line))), None)
    return BootLog(
        capture_s=sum(float(match["seconds"]) for match in captures) if captures else None,
        capture_gb=sum(float(match["gigabytes"]) for match in captures) if captures else None,
        plugin_line=active,
    )


def _lines(text: str) -> list[str]:
    # Progress bars end in a carriage return and can be glued to the next record.
    return re.split(r"[\r\n]+", text)


def _data_parallel_ranks(lines: Sequence[str]) -> set[str]:
    decodes = (line.partition("Decode batch")[0] for line in lines if "Decode batch" in line)
    return {match[1] for prefix in decodes if (match := _DP_RANK.search(prefix))}


def _count(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    return sum(1 for line in lines if pattern.search(line))


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    return float(match[1]) if match else None
