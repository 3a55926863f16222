"""Requests as seen by the client -> throughput and latency of one level. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Trace:
    """One request. Times are seconds on one monotonic clock.

    chunks: (arrival, output tokens received so far), one per chunk that brought tokens.
    verify_steps: verify steps the server counted for it, None without speculation.
    """

    start: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    end: float = 0.0
    verify_steps: int | None = None

    @property
    def first_token(self) -> float:
        return self.chunks[0][0]

    @property
    def tokens(self) -> int:
        return self.chunks[-1][1]

    def tokens_at(self, time: float) -> float:
        """Output tokens by ``time``. A chunk's tokens came evenly since the chunk before."""
        index = bisect_right(self.chunks, (time, float("inf")))
        if index == 0:
            return 0.0
        if index == len(self.chunks):
            return float(self.tokens)
        (t0, n0), (t1, n1) = self.chunks[index - 1], self.chunks[index]
        return n0 + (n1 - n0) * (time - t0) / (t1 - t0)


@dataclass(frozen=True)
class ClientFigures:
    """One level as seen by the client: tokens/s, seconds, milliseconds.

    tok_s: all output tokens over the whole level, ramp-up and tail included.
    steady_tok_s: tokens that arrived while C requests were in flight, over that time (prefill of
    the requests that replace finished ones included); None if there was no such time.
    """

    requests: int
    output_tokens: int
    wall_s: float
    tok_s: float
    steady_s: float | None
    steady_tok_s: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    ttft_ms_p50: float
    ttft_ms_p99: float
    accept_len: float | None


def client_figures(traces: Sequence[Trace], concurrency: int) -> ClientFigures:
    """Figures of one level; ``traces`` is not empty and every request finished."""
    begin = min(trace.start for trace in traces)
    wall = max(trace.end for trace in traces) - begin
    tokens = sum(trace.tokens for trace in traces)
    window = steady_window(traces, concurrency)
    steady_s = steady_tok_s = None
    if window is not None:
        start, stop = window
        steady_s = stop - start
        arrived = sum(trace.tokens_at(stop) - trace.tokens_at(start) for trace in traces)
        steady_tok_s = arrived / steady_s
    gaps = [gap for trace in traces for gap in _token_gaps(trace)]
    ttft = [(trace.first_token - trace.start, 1) for trace in traces]
    return ClientFigures(
        requests=len(traces),
        output_tokens=tokens,
        wall_s=wall,
        tok_s=tokens / wall,
        steady_s=steady_s,
        steady_tok_s=steady_tok_s,
        itl_ms_p50=weighted_percentile(gaps, 0.50) * 1e3 if gaps else None,
        itl_ms_p99=weighted_percentile(gaps, 0.99) * 1e3 if gaps else None,
        ttft_ms_p50=weighted_percentile(ttft, 0.50) * 1e3,
        ttft_ms_p99=weighted_percentile(ttft, 0.99) * 1e3,
        accept_len=_accept_length(traces),
    )


def steady_window(traces: Sequence[Trace], concurrency: int) -> tuple[float, float] | None:
    """From when the first C requests all have their first token until one slot stays empty."""
    by_start = sorted(traces, key=lambda trace: trace.start)
    if len(by_start) <= concurrency:
        return None
    full = max(trace.first_token for trace in by_start[:concurrency])
    last_start = by_start[-1].start
    drained = min(trace.end for trace in traces if trace.end > last_start)
    return (full, drained) if drained > full else None


def weighted_percentile(values: Iterable[tuple[float, int]], share: float) -> float:
    """The smallest value with at least ``share`` of the weight at or below it."""
    ordered = sorted(values)
    needed = share * sum(weight for _, weight in ordered)
    reached = 0
    for value, weight in ordered:
        reached += weight
        if reached >= needed:
            return value
    return ordered[-1][0]


def _token_gaps(trace: Trace) -> Iterable[tuple[float, int]]:
    """(seconds per token, tokens) of every chunk after the first."""
    for (t0, n0), (t1, n1) in zip(trace.chunks, trace.chunks[1:], strict=False):
        yield (t1 - t0) / (n1 - n0), n1 - n0


def _accept_length(traces: Sequence[Trace]) -> float | None:
    steps = [trace.verify_steps for trace in traces]
    if any(count is None for count in steps) or not sum(count or 0 for count in steps):
        return None
    return sum(trace.tokens for trace in traces) / sum(count or 0 for count in steps)
