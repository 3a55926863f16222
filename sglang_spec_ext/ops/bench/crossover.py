"""From the levels of ``off`` and ``on`` to the recommended threshold N, or why there is none.

With threshold N, N or fewer running requests speculate. So N is the concurrency up to which `on`
is faster. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from sglang_spec_ext.ops.bench.results import Level, Run

# A level counts as running on graphs if (almost) every decode step at C did.
_GRAPH_SHARE = 0.99
# Retractions and late admissions can leave a level at C only briefly; its figures are then of a
# smaller batch.
_AT_LEVEL_SHARE = 0.5

SERVER_METRIC = "server's decode tok/s"
STEADY_METRIC = "steady tok/s"
END_TO_END_METRIC = "end-to-end tok/s"


@dataclass(frozen=True)
class Sample:
    """One variant at one concurrency: median and relative spread, (max - min) / median, over all
    times that it was measured."""

    value: float
    spread: float
    times: int
    boots: int


@dataclass(frozen=True)
class Judged:
    """One level of the comparison. winner: "on", "off", None inside the noise or if refused.

    noise: relative difference below which the level decides nothing. refused: why the level cannot
    be used, None if it can.
    """

    concurrency: int
    on: Sample
    off: Sample
    noise: float
    winner: str | None
    refused: str | None = None

    @property
    def ratio(self) -> float:
        return self.on.value / self.off.value


@dataclass(frozen=True)
class Recommendation:
    """threshold: N in requests, or None. headline: the answer in one sentence. reasons: what it
    rests on and what was refused. advice: what to do next."""

    threshold: int | None
    headline: str
    reasons: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)


def levels_of(runs: Sequence[Run], variant: str, concurrency: int) -> list[Level]:
    return [
        level
        for run in runs
        if run.variant == variant
        for level in run.levels
        if level.concurrency == concurrency
    ]


def choose_metric(runs: Sequence[Run], variants: Sequence[str]) -> str:
    """The best figure that every measured level of these variants has."""
    levels = [level for run in runs if run.variant in variants for level in run.levels]
    if levels and all(level.server_tok_s and level.server_tok_s_clean for level in levels):
        return SERVER_METRIC
    if levels and all(level.steady_tok_s for level in levels):
        return STEADY_METRIC
    return END_TO_END_METRIC


def value_of(level: Level, metric: str) -> float:
    if metric == SERVER_METRIC and level.server_tok_s:
        return level.server_tok_s
    if metric == STEADY_METRIC and level.steady_tok_s:
        return level.steady_tok_s
    return level.tok_s


def values_of(runs: Sequence[Run], variant: str, concurrency: int, metric: str) -> list[float]:
    """One value per boot and round."""
    return [value_of(level, metric) for level in levels_of(runs, variant, concurrency)]


def sample(runs: Sequence[Run], variant: str, concurrency: int, metric: str) -> Sample | None:
    values = values_of(runs, variant, concurrency, metric)
    if not values:
        return None
    middle = median(values)
    boots = sum(bool(levels_of([run], variant, concurrency)) for run in runs)
    return Sample(middle, (max(values) - min(values)) / middle, len(values), boots)


def refusal(level: Level) -> str | None:
    """Why this level shows something else than C requests decoding as they would in service."""
    if is_queued(level):
        seen = level.running_max if level.running_max is not None else level.admission_cap
        return (
            f"was queued at the admission cap: {seen} of {level.concurrency} requests ran; "
            "raise --max-running-requests (or the KV pool)"
        )
    if level.retractions:
        return (
            f"ran out of KV cache ({level.retractions} retractions); enlarge the KV pool or "
            "shorten the requests"
        )
    if level.graph_backend == "cuda" and (level.graph_share or 0.0) < _GRAPH_SHARE:
        return (
            f"ran only {(level.graph_share or 0.0):.0%} of its steps on CUDA graphs; "
            "raise the largest captured batch size (--cuda-graph-max-bs) to this level"
        )
    if level.at_level_share is not None and level.at_level_share < _AT_LEVEL_SHARE:
        return (
            f"had {level.concurrency} requests running in only {level.at_level_share:.0%} of the "
            "server's log lines; give longer outputs"
        )
    return None


def is_queued(level: Level) -> bool:
    """True if the server could not run C requests at once."""
    if level.running_max is not None:
        return level.running_max < level.concurrency and bool(level.queued)
    return level.admission_cap is not None and level.admission_cap < level.concurrency


def recommend(runs: Sequence[Run], tolerance: float) -> Recommendation:
    """``tolerance``: relative difference that counts as noise even if boots agree better."""
    metric = choose_metric(runs, ("off", "on"))
    judged = _judge(runs, metric, tolerance)
    if not judged:
        return Recommendation(
            None,
            "no recommendation: it needs levels that both `off` and `on` measured",
            advice=["measure both: --variants off,on"],
        )
    reasons = _reasons(judged, metric, tolerance)
    return _decide(judged, reasons)


def _judge(runs: Sequence[Run], metric: str, tolerance: float) -> list[Judged]:
    concurrencies = sorted({level.concurrency for run in runs for level in run.levels})
    judged = []
    for concurrency in concurrencies:
        on = sample(runs, "on", concurrency, metric)
        off = sample(runs, "off", concurrency, metric)
        if on is None or off is None:
            continue
        refusals = [
            f"`{variant}` {why}"
            for variant in ("off", "on")
            for level in levels_of(runs, variant, concurrency)
            if (why := refusal(level))
        ]
        refused = refusals[0] if refusals else None
        noise = max(tolerance, on.spread, off.spread)
        ratio = on.value / off.value
        winner = None
        if refused is None and ratio > 1 + noise:
            winner = "on"
        elif refused is None and ratio < 1 - noise:
            winner = "off"
        judged.append(Judged(concurrency, on, off, noise, winner, refused))
    return judged


def _decide(judged: Sequence[Judged], reasons: list[str]) -> Recommendation:
    decided = [level for level in judged if level.winner]
    refused = [level for level in judged if level.refused]
    found = list(judged)
    if not decided:
        if len(refused) == len(judged):
            return Recommendation(
                None,
                "no crossover named: no level can be used",
                reasons,
                ["remove the causes named above and measure again"],
                found,
            )
        return Recommendation(
            None,
            "no crossover found: `on` and `off` differ by no more than the noise at every usable "
            "level",
            reasons,
            [
                "measure with more requests per level, --rounds or --boots, or at other "
                "concurrencies"
            ],
            found,
        )
    winners = [level.winner for level in decided if level.winner]
    if winners == sorted(winners, reverse=True):  # "on"s first, then "off"s
        if winners[-1] == "on":
            return _always_on(decided, refused, reasons, found)
        if winners[0] == "off":
            return _always_off(decided, refused, reasons, found)
        return _bracketed(judged, decided, reasons)
    order = ", ".join(f"C={level.concurrency}: {level.winner}" for level in decided)
    return Recommendation(
        None,
        "no crossover named: the faster variant changes more than once, or speculation pays only "
        f"above some load ({order})",
        reasons,
        ["repeat with more requests per level; a threshold can only switch off above N"],
        found,
    )


def _bracketed(
    judged: Sequence[Judged], decided: Sequence[Judged], reasons: list[str]
) -> Recommendation:
    low = [level for level in decided if level.winner == "on"][-1]
    high = next(level for level in decided if level.winner == "off")
    between = [level for level in judged if low.concurrency < level.concurrency < high.concurrency]
    hidden = [level for level in between if level.refused]
    if hidden:
        return Recommendation(
            None,
            f"no crossover named: it lies between C={low.concurrency} and C={high.concurrency}, "
            f"where C={hidden[0].concurrency} cannot be used",
            reasons,
            ["remove the cause named above and measure again"],
            list(judged),
        )
    crossing = _log_interpolated(low, high)
    threshold = math.floor(crossing + 1e-9)  # 4.0 may come out as 3.9999999999999996
    reasons = [
        f"speculation is faster at C={low.concurrency} ({low.ratio:.2f} of off) and slower at "
        f"C={high.concurrency} ({high.ratio:.2f}); interpolated over log C: {crossing:.1f}",
        *reasons,
    ]
    advice = [f"serve with --speculative-disable-batch-threshold {threshold}"]
    finer = _levels_between(low.concurrency, high.concurrency)
    if high.concurrency > 1.5 * low.concurrency and finer:
        advice.append(
            "to narrow it down, measure between: --concurrency "
            + ",".join(str(c) for c in [low.concurrency, *finer, high.concurrency])
        )
    return Recommendation(
        threshold,
        f"recommended N = {threshold}: up to {threshold} running requests speculation is faster, "
        "above it the target alone",
        reasons,
        advice,
        list(judged),
    )


def _always_on(
    decided: Sequence[Judged],
    refused: Sequence[Judged],
    reasons: list[str],
    judged: list[Judged],
) -> Recommendation:
    top = decided[-1].concurrency
    above = [level for level in refused if level.concurrency > top]
    advice = (
        [f"C={above[0].concurrency} and above could not be judged: remove the cause named above"]
        if above
        else [f"measure above C={top}; if the server never runs more, it needs no threshold"]
    )
    return Recommendation(
        None,
        f"no crossover found: speculation wins at every usable level (up to C={top})",
        reasons,
        advice,
        judged,
    )


def _always_off(
    decided: Sequence[Judged],
    refused: Sequence[Judged],
    reasons: list[str],
    judged: list[Judged],
) -> Recommendation:
    bottom = decided[0].concurrency
    below = [level for level in judged if level.concurrency < bottom]
    if below:
        advice = [f"below C={bottom} nothing was decided: measure C=1..{bottom} with more requests"]
    elif bottom > 1:
        advice = [f"measure below C={bottom}"]
    else:
        advice = [
            "serve without speculation, or with a better draft: this one never pays on this machine"
        ]
    return Recommendation(
        None,
        f"no crossover found: speculation loses at every usable level (from C={bottom} on)",
        reasons,
        advice,
        judged,
    )


def _reasons(judged: Sequence[Judged], metric: str, tolerance: float) -> list[str]:
    boots = min(min(level.on.boots, level.off.boots) for level in judged)
    reasons = [f"compared by {metric}"]
    if boots < 2:
        reasons.append(
            "one boot only, so the spread of boots is unknown: differences up to "
            f"{tolerance:.1%} count as noise (--boots 2 measures it)"
        )
    for level in judged:
        if level.refused:
            reasons.append(f"C={level.concurrency} not used: {level.refused}")
        elif level.winner is None:
            reasons.append(
                f"C={level.concurrency} decides nothing: on/off = {level.ratio:.3f} lies inside "
                f"the noise of {level.noise:.1%}"
            )
    return reasons


def _log_interpolated(low: Judged, high: Judged) -> float:
    """Where log(on/off), a straight line over log C between the two levels, is zero."""
    x0, x1 = math.log(low.concurrency), math.log(high.concurrency)
    y0, y1 = math.log(low.ratio), math.log(high.ratio)
    return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))


def _levels_between(low: int, high: int, count: int = 3) -> list[int]:
    step = (high / low) ** (1 / (count + 1))
    inner = {round(low * step**index) for index in range(1, count + 1)}
    return sorted(c for c in inner if low < c < high)
