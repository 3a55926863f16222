"""Results -> tables and sentences, as plain data. ``render.py`` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sglang_spec_ext.ops.bench.crossover import (
    choose_metric,
    is_queued,
    levels_of,
    refusal,
    sample,
    values_of,
)
from sglang_spec_ext.ops.bench.results import Level, Results, Run

# What DESIGN asks of every level against the better of never and always speculating.
RATIO_BAR = 0.97

MISSING = "-"


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Ratio:
    """One variant against the better of `on` and `off` at one concurrency: the median of all
    times that it was measured, the lowest and the highest."""

    variant: str
    concurrency: int
    ratio: float
    lowest: float
    highest: float


def measured_variants(results: Results) -> list[str]:
    """Labels with at least one level, `off` and `on` first, then in the order of the plan."""
    seen = [run.variant for run in results.runs if run.levels]
    order = ["off", "on", *results.plan.variants, *seen]
    return [label for label in dict.fromkeys(order) if label in seen]


def measured_concurrencies(results: Results) -> list[int]:
    return sorted({level.concurrency for run in results.runs for level in run.levels})


def metric_of(results: Results) -> str:
    return choose_metric(results.runs, measured_variants(results))


def envelope(results: Results, metric: str) -> dict[int, float]:
    """Concurrency -> the better of `on` and `off`, where both were measured."""
    best = {}
    for concurrency in measured_concurrencies(results):
        on = sample(results.runs, "on", concurrency, metric)
        off = sample(results.runs, "off", concurrency, metric)
        if on and off:
            best[concurrency] = max(on.value, off.value)
    return best


def ratios(results: Results, metric: str) -> list[Ratio]:
    """Every variant but `on` and `off` against the envelope."""
    return [
        Ratio(
            variant,
            concurrency,
            median(values) / best,
            min(values) / best,
            max(values) / best,
        )
        for variant in measured_variants(results)
        if variant not in ("on", "off")
        for concurrency, best in envelope(results, metric).items()
        if (values := values_of(results.runs, variant, concurrency, metric))
    ]


def throughput_table(results: Results) -> Table:
    """Variants by concurrency: throughput with its spread, then the ratios."""
    metric = metric_of(results)
    concurrencies = measured_concurrencies(results)
    rows, samples = [], []
    for variant in measured_variants(results):
        cells = [variant]
        for concurrency in concurrencies:
            here = sample(results.runs, variant, concurrency, metric)
            if here is None:
                cells.append(MISSING)
                continue
            samples.append((here.times, here.boots))
            spread = f" ±{here.spread / 2:.1%}" if here.times > 1 else ""
            mark = "*" if _refused(results.runs, variant, concurrency) else ""
            cells.append(f"{_number(here.value)}{mark}{spread}")
        rows.append(cells)
    by_variant: dict[str, dict[int, float]] = {}
    for item in ratios(results, metric):
        by_variant.setdefault(item.variant, {})[item.concurrency] = item.ratio
    for variant, values in by_variant.items():
        cells = [f"{values[c]:.3f}" if c in values else MISSING for c in concurrencies]
        rows.append([f"{variant} / max(on, off)", *cells])
    caption = metric
    times, boots = max(samples, default=(0, 0))
    if times > 1:
        each = f"{boots} boots" if times == boots else f"{times} measurements, boots: {boots}"
        caption += f"; ± is half the spread of {each}"
    if any("*" in cell for row in rows for cell in row):
        caption += "; * see the remarks"
    return Table(
        "Output tokens per second by concurrency",
        ["variant", *map(str, concurrencies)],
        rows,
        caption,
    )


def detail_table(results: Results) -> Table:
    """One row per concurrency and variant, medians over all times that it was measured."""
    columns = [
        "C",
        "variant",
        "times",
        "server tok/s",
        "steady tok/s",
        "end to end",
        "ITL p50",
        "ITL p99",
        "TTFT p50",
        "TTFT p99",
        "accept",
        "graphs",
        "running",
        "switches",
    ]
    rows = []
    for concurrency in measured_concurrencies(results):
        for variant in measured_variants(results):
            levels = levels_of(results.runs, variant, concurrency)
            if levels:
                rows.append([str(concurrency), variant, *_detail_cells(levels)])
    return Table("Details", columns, rows, "latencies in ms; running: most requests seen at once")


def boot_table(results: Results) -> Table | None:
    """What booting cost, None if no server was booted."""
    runs = [run for run in results.runs if run.boot_s is not None]
    if not runs:
        return None
    rows = [
        [
            run.variant,
            str(run.boot),
            _fixed(run.boot_s, 1),
            _fixed(run.capture_s, 1),
            _fixed(run.capture_gb, 2),
            MISSING if run.gpu_memory_used_mib is None else str(sum(run.gpu_memory_used_mib)),
        ]
        for run in runs
    ]
    columns = ["variant", "boot", "boot s", "capture s", "graphs GB", "GPU memory MiB"]
    return Table("Boots", columns, rows)


def remarks(results: Results) -> list[str]:
    """Everything that a reader of the tables must know: failures, doubts, unusable levels."""
    found = []
    for run in results.runs:
        name = f"{run.variant}, boot {run.boot}"
        if run.failure:
            found.append(f"{name}: {run.failure}")
        found += [f"{name}: {note}" for note in run.notes]
        found += [f"{name}, C={c}: failed, {why}" for c, why in run.failed_levels.items()]
        for level in run.levels:
            if why := refusal(level):
                found.append(f"{name}, C={level.concurrency}: {why}")
            found += [f"{name}, C={level.concurrency}: {note}" for note in level.notes]
    found += _blind_spots(results)
    return list(dict.fromkeys(found))


def worst_ratio(results: Results) -> list[str]:
    """One sentence per variant that should follow the envelope."""
    sentences = []
    items = ratios(results, metric_of(results))
    for variant in dict.fromkeys(item.variant for item in items):
        worst = min((i for i in items if i.variant == variant), key=lambda item: item.ratio)
        verdict = "reaches" if worst.ratio >= RATIO_BAR else "misses"
        doubt = ""
        if worst.lowest < RATIO_BAR <= worst.highest:
            doubt = (
                f", but what was measured ranges from {worst.lowest:.3f} to {worst.highest:.3f}: "
                "more --rounds or --boots tell"
            )
        sentences.append(
            f"{variant}: at worst {worst.ratio:.3f} of the better of on and off "
            f"(C={worst.concurrency}); {verdict} the bar of {RATIO_BAR}{doubt}"
        )
    return sentences


def _blind_spots(results: Results) -> list[str]:
    levels = [level for run in results.runs for level in run.levels]
    spots = []
    if levels and all(level.graph_backend is None for level in levels):
        spots.append(
            "no server log was read: graph use, admission and switches are unknown (--log FILE)"
        )
    simulated = any(
        "SGLANG_SIMULATE_ACC_LEN" in run.environment.get("variables", {}) for run in results.runs
    )
    if simulated:
        spots.append("acceptance was simulated (SGLANG_SIMULATE_ACC_LEN): fair for speed only")
    elif levels and results.plan.load.prompts.startswith("random ids"):
        spots.append(
            "random prompts draft worse than real text: measure with --prompts FILE of your "
            "traffic before you settle on N"
        )
    return spots


def _detail_cells(levels: Sequence[Level]) -> list[str]:
    graph = [level.graph_share for level in levels if level.graph_share is not None]
    backend = next((level.graph_backend for level in levels if level.graph_backend), None)
    queued = any(is_queued(level) for level in levels)
    running = [level.running_max for level in levels if level.running_max is not None]
    server = _middle([level.server_tok_s for level in levels])
    clean = all(level.server_tok_s_clean for level in levels)
    return [
        str(len(levels)),
        MISSING if server is None else _number(server) + ("" if clean else "~"),
        _number(_middle([level.steady_tok_s for level in levels])),
        _number(_middle([level.tok_s for level in levels])),
        _fixed(_middle([level.itl_ms_p50 for level in levels]), 2),
        _fixed(_middle([level.itl_ms_p99 for level in levels]), 2),
        _fixed(_middle([level.ttft_ms_p50 for level in levels]), 1),
        _fixed(_middle([level.ttft_ms_p99 for level in levels]), 1),
        _fixed(_middle([level.accept_len for level in levels]), 2),
        MISSING
        if not graph
        else f"{min(graph):.0%}" + ("" if backend == "cuda" else f" {backend}"),
        MISSING if not running else str(min(running)) + (" queued" if queued else ""),
        str(max(level.switches + level.adaptive_switches for level in levels)),
    ]


def _refused(runs: Sequence[Run], variant: str, concurrency: int) -> bool:
    return any(refusal(level) for level in levels_of(runs, variant, concurrency))


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _number(value: float | None) -> str:
    """Tokens/s: whole numbers, one decimal for slow servers."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _fixed(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"
