"""Requests as the client saw them become throughput and latency."""

from __future__ import annotations

import pytest

from sglang_spec_ext.ops.bench.figures import (
    Trace,
    client_figures,
    steady_window,
    weighted_percentile,
)


def trace(start: float, chunks: list[tuple[float, int]], steps: int | None = None) -> Trace:
    return Trace(start, chunks, chunks[-1][0], steps)


@pytest.mark.parametrize(
    ("time", "tokens"),
    [(0.5, 0), (1.0, 1), (2.0, 3), (3.0, 5), (3.5, 7.5), (4.0, 10), (9.0, 10)],
)
def test_tokens_of_a_chunk_came_evenly(time: float, tokens: float) -> None:
    assert trace(0, [(1, 1), (3, 5), (4, 10)]).tokens_at(time) == tokens


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1), (0.5, 1), (0.75, 1), (0.76, 2), (0.99, 3), (1.0, 3)]
)
def test_weighted_percentile(share: float, value: float) -> None:
    assert weighted_percentile([(3, 1), (1, 6), (2, 1)], share) == value


def test_steady_state_is_while_every_slot_is_busy() -> None:
    # two slots: the first wave is slow to start, the second ends one slot after the other
    first = [trace(0, [(1, 1), (5, 9)]), trace(0, [(2, 1), (6, 9)])]
    second = [trace(5, [(6, 1), (10, 9)]), trace(6, [(7, 1), (12, 9)])]
    assert steady_window(first + second, 2) == (2, 10)
    figures = client_figures(first + second, 2)
    # first wave from second 2: 6 + 8 tokens; second wave until 10: 9 + 1 + 8 * 3/5
    assert figures.steady_tok_s == pytest.approx((6 + 8 + 9 + 1 + 4.8) / 8)
    assert figures.tok_s == pytest.approx(36 / 12)
    assert (figures.requests, figures.output_tokens, figures.wall_s) == (4, 36, 12)


def test_no_steady_state_without_a_second_wave() -> None:
    traces = [trace(0, [(1, 1), (2, 3)]), trace(0, [(1, 1), (2, 3)])]
    assert steady_window(traces, 2) is None
    assert client_figures(traces, 2).steady_tok_s is None


def test_latencies_are_per_token_and_weighted_by_tokens() -> None:
    # 15 tokens at 0.1 s, one at 2 s
    figures = client_figures([trace(0, [(0.5, 1), (2.0, 16), (4.0, 17)])], 1)
    assert figures.itl_ms_p50 == pytest.approx(100)
    assert figures.itl_ms_p99 == pytest.approx(2000)
    assert (figures.ttft_ms_p50, figures.ttft_ms_p99) == (500, 500)


def test_everything_in_one_chunk_has_no_latency_between_tokens() -> None:
    figures = client_figures([trace(0, [(1, 4)])], 1)
    assert (figures.itl_ms_p50, figures.itl_ms_p99) == (None, None)


@pytest.mark.parametrize(
    ("steps", "accept"), [((4, 4), 2.25), ((None, None), None), ((4, None), None), ((0, 0), None)]
)
def test_accept_length_needs_verify_steps(
    steps: tuple[int | None, int | None], accept: float | None
) -> None:
    traces = [trace(0, [(1, 1), (2, 9)], count) for count in steps]
    assert client_figures(traces, 1).accept_len == accept
