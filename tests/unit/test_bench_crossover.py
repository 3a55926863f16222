"""The recommended N, and every reason not to name one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench_levels import curve, level, run

from sglang_spec_ext.ops.bench.crossover import (
    END_TO_END_METRIC,
    SERVER_METRIC,
    STEADY_METRIC,
    Recommendation,
    choose_metric,
    recommend,
    refusal,
    sample,
)
from sglang_spec_ext.ops.bench.results import Run

OFF = {1: 200.0, 2: 400.0, 4: 800.0, 8: 1600.0, 16: 3200.0, 32: 6400.0}


def by_ratio(ratios: dict[int, float], tolerance: float = 0.02) -> Recommendation:
    """`off` doubles with every level, `on` is ``ratios`` times that; two equal boots."""
    off = {c: 200.0 * c for c in ratios}
    on = {c: off[c] * ratio for c, ratio in ratios.items()}
    runs = [curve(v, values, boot) for v, values in (("off", off), ("on", on)) for boot in (1, 2)]
    return recommend(runs, tolerance)


@pytest.mark.parametrize(
    ("ratios", "threshold"),
    [
        # the slope of log ratio over log C decides: half way between 16 and 64 is 32
        ({1: 1.6, 16: 2.0, 64: 0.5}, 32),
        ({16: 1.25, 32: 0.8}, 22),  # sqrt(16 * 32) = 22.6, rounded down
        ({16: 1.21, 32: 0.91}, 25),
        ({1: 1.5, 2: 0.5}, 1),
        # never below the level that speculation wins, never up to one that it loses
        ({4: 1.03, 5: 0.2}, 4),
        ({4: 3.0, 5: 0.97}, 4),
        # a tie between is skipped, not used
        ({8: 2.0, 16: 1.005, 32: 0.5}, 16),
        # ties outside the bracket do not matter
        ({1: 1.0, 2: 1.2, 4: 1.5, 16: 2 / 3, 32: 1.01}, 8),
    ],
)
def test_threshold(ratios: dict[int, float], threshold: int) -> None:
    answer = by_ratio(ratios)
    assert answer.threshold == threshold
    assert f"N = {threshold}" in answer.headline
    assert f"--speculative-disable-batch-threshold {threshold}" in answer.advice[0]


@pytest.mark.parametrize(
    ("ratios", "headline", "advice"),
    [
        ({1: 1.6, 64: 1.1}, "speculation wins at every usable level (up to C=64)", "above C=64"),
        ({1: 1.6, 64: 1.01}, "speculation wins at every usable level (up to C=1)", "above C=1"),
        ({1: 0.9, 8: 0.5}, "speculation loses at every usable level (from C=1", "better draft"),
        ({4: 0.9, 8: 0.5}, "speculation loses at every usable level (from C=4", "below C=4"),
        ({1: 1.0, 8: 0.5}, "speculation loses at every usable level (from C=8", "C=1..8"),
        ({1: 1.01, 8: 0.99}, "no more than the noise", "more requests"),
        ({1: 1.5, 4: 0.8, 8: 1.5}, "changes more than once", "repeat"),
        ({1: 0.8, 8: 1.5}, "pays only above some load", "repeat"),
    ],
)
def test_no_crossover(ratios: dict[int, float], headline: str, advice: str) -> None:
    answer = by_ratio(ratios)
    assert answer.threshold is None
    assert headline in answer.headline
    assert any(advice in text for text in answer.advice)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"graph_share": 0.6}, "60% of its steps on CUDA graphs"),
        ({"graph_share": None}, "0% of its steps on CUDA graphs"),
        ({"running_max": 12, "queued": 4}, "queued at the admission cap: 12 of 16"),
        ({"running_max": None, "admission_cap": 12}, "queued at the admission cap: 12 of 16"),
        ({"retractions": 3}, "KV cache (3 retractions)"),
        ({"at_level_share": 0.2}, "16 requests running in only 20%"),
    ],
)
def test_a_level_that_shows_something_else_is_refused(facts: dict[str, Any], reason: str) -> None:
    runs = [
        run("off", level(8, 100), level(16, 200)),
        run("on", level(8, 150), level(16, 100, **facts)),
    ]
    answer = recommend(runs, 0.02)
    assert answer.threshold is None
    assert "speculation wins at every usable level (up to C=8)" in answer.headline
    assert any("C=16 not used: `on`" in text and reason in text for text in answer.reasons)
    assert "C=16 and above could not be judged" in answer.advice[0]


@pytest.mark.parametrize(
    "facts",
    [
        {"graph_backend": "cpu", "graph_share": 0.0},  # no graphs where there are none
        {"graph_backend": None, "graph_share": None},  # no log
        {"running_max": 15, "queued": 0},  # nobody waited
        {"running_max": None, "admission_cap": 16},
        {"running_max": 16, "queued": 3},
    ],
)
def test_levels_that_are_fine(facts: dict[str, Any]) -> None:
    assert refusal(level(16, 100, **facts)) is None


def test_no_crossover_across_a_level_that_cannot_be_used() -> None:
    runs = [
        run("off", level(8, 100), level(16, 200), level(32, 400)),
        run("on", level(8, 150), level(16, 200, graph_share=0.0), level(32, 200)),
    ]
    answer = recommend(runs, 0.02)
    assert answer.threshold is None
    assert "between C=8 and C=32, where C=16 cannot be used" in answer.headline


def test_no_level_can_be_used() -> None:
    runs = [curve("off", OFF, graph_share=0.0), curve("on", OFF)]
    answer = recommend(runs, 0.02)
    assert answer.threshold is None and "no level can be used" in answer.headline


def test_spread_of_boots_is_noise() -> None:
    """20 % apart on average, but two boots of `off` differ by 30 %."""
    on = [curve("on", {1: 300, 8: 800}, boot) for boot in (1, 2)]
    off = [curve("off", {1: 200, 8: 850}), curve("off", {1: 200, 8: 1150}, 2)]
    answer = recommend(on + off, 0.02)
    assert answer.threshold is None
    assert any("C=8 decides nothing: on/off = 0.800" in text for text in answer.reasons)
    steady = [curve("off", {1: 200, 8: 1000}, boot) for boot in (1, 2)]
    assert recommend(on + steady, 0.02).threshold is not None


def test_tolerance_is_noise_even_without_spread() -> None:
    ratios = {1: 1.5, 8: 0.96}
    assert by_ratio(ratios, tolerance=0.02).threshold is not None
    assert by_ratio(ratios, tolerance=0.05).threshold is None


def test_one_boot_is_said() -> None:
    answer = recommend([curve("off", OFF), curve("on", OFF)], 0.02)
    assert any("one boot only" in text for text in answer.reasons)


@pytest.mark.parametrize(
    "runs", [[], [curve("off", OFF)], [curve("off", {1: 1.0}), curve("on", {2: 1.0})]]
)
def test_both_variants_are_needed(runs: list[Run]) -> None:
    answer = recommend(runs, 0.02)
    assert answer.threshold is None and "both" in answer.headline


def test_variants_are_compared_by_one_figure() -> None:
    good = curve("off", {1: 100.0})
    assert choose_metric([good, curve("on", {1: 1.0})], ("off", "on")) == SERVER_METRIC
    for lacking in ({"server_tok_s": None}, {"server_tok_s_clean": False}):
        runs = [good, curve("on", {1: 1.0}, **lacking)]
        assert choose_metric(runs, ("off", "on")) == STEADY_METRIC
        assert choose_metric(runs, ("off",)) == SERVER_METRIC
    runs = [good, curve("on", {1: 1.0}, server_tok_s=None, steady_tok_s=None)]
    assert choose_metric(runs, ("off", "on")) == END_TO_END_METRIC


def test_sample_is_the_median_with_its_spread() -> None:
    runs = [curve("off", {8: value}, boot) for boot, value in enumerate((90, 100, 120), 1)]
    got = sample(runs, "off", 8, SERVER_METRIC)
    assert got is not None
    assert (got.value, got.times, got.boots) == (100, 3, 3)
    assert got.spread == pytest.approx(0.3)
    one_boot = run("off", *(level(8, value) for value in (90, 100, 120)))
    assert sample([one_boot], "off", 8, SERVER_METRIC) == replace(got, boots=1)
    assert sample(runs, "on", 8, SERVER_METRIC) is None


def test_finer_levels_are_suggested() -> None:
    answer = by_ratio({16: 1.25, 32: 0.8})
    assert answer.advice[1].endswith("--concurrency 16,19,23,27,32")
    assert len(by_ratio({4: 1.25, 5: 0.8}).advice) == 1
