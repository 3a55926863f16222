"""The chart: throughput over concurrency with the envelope, below it our ratio to the envelope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from sglang_spec_ext.ops.bench.crossover import levels_of, refusal, values_of
from sglang_spec_ext.ops.bench.report import (
    RATIO_BAR,
    Ratio,
    envelope,
    measured_concurrencies,
    measured_variants,
    metric_of,
    ratios,
)
from sglang_spec_ext.ops.bench.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart with every kind of colour vision; markers tell apart in grey.
_OFF, _ON = "#0072B2", "#D55E00"
_OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("D", "^", "v", "P")
_INK, _GREY, _GRID, _SHADE = "#222222", "#767676", "#D9D9D9", "#EFEFEF"

# Ratios below are drawn at the edge with their value: one bad point must not flatten the rest.
_RATIO_FLOOR = 0.80

_WIDTH_IN, _HEIGHT_IN, _HEIGHT_WITHOUT_RATIOS_IN, _DPI = 10.0, 7.4, 5.2, 100
_LEFT = 0.075
_OUTLINE_STEPS = 32  # per pair of levels

# `on` and `off` are wide, so that a variant that coincides with one of them leaves it visible.
_WIDE, _NARROW = 4.0, 1.8


class ChartError(RuntimeError):
    """No chart can be drawn; the message names the fix."""


def draw_chart(results: Results, path: Path, threshold: int | None) -> None:
    """Writes a PNG, 1000 pixels wide (or the format that the suffix names).

    threshold: the recommended N, marked if not None.
    Raises ChartError if matplotlib is missing or nothing was measured.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ChartError(
            "the chart needs matplotlib: pip install 'sglang-spec-ext[bench]'"
        ) from error
    if not measured_variants(results):
        raise ChartError("nothing was measured, so there is nothing to draw")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    metric = metric_of(results)
    items = ratios(results, metric)
    style: Any = {
        "font.size": 11,
        "text.color": _INK,
        "axes.edgecolor": _GREY,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        height = _HEIGHT_IN if items else _HEIGHT_WITHOUT_RATIOS_IN
        if items:
            figure, (upper, lower) = pyplot.subplots(
                2, 1, sharex=True, figsize=(_WIDTH_IN, height), height_ratios=(2.6, 1)
            )
        else:
            figure, upper = pyplot.subplots(figsize=(_WIDTH_IN, height))
            lower = None
        try:
            looks = _looks(measured_variants(results))
            _draw_throughput(upper, results, metric, looks, threshold)
            if lower is not None:
                _draw_ratios(lower, items, looks, threshold)
            bottom = lower if lower is not None else upper
            _label_concurrency(bottom, measured_concurrencies(results))
            figure.suptitle(
                "Output tokens per second over concurrent requests",
                x=_LEFT,
                y=0.98,
                ha="left",
                fontsize=14,
                fontweight="bold",
            )
            figure.text(
                _LEFT, 1 - 0.42 / height, subtitle(results), fontsize=9.5, color=_GREY, va="top"
            )
            figure.subplots_adjust(
                left=_LEFT, right=0.955, top=1 - 1.0 / height, bottom=0.6 / height, hspace=0.09
            )
            figure.savefig(path, dpi=_DPI)
        finally:
            pyplot.close(figure)


def subtitle(results: Results) -> str:
    """What was measured on what, in two lines."""
    runs = [run for run in results.runs if run.levels]
    environment = runs[0].environment
    gpus = [gpu["name"] for gpu in environment.get("gpus") or []]
    speculating = next((run.server for run in runs if run.server.get("speculative_algorithm")), {})
    server = speculating or runs[0].server
    machine = [
        f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else (gpus[0] if gpus else ""),
        f"SGLang {environment['sglang']}" if environment.get("sglang") else "",
        f"{server['attention_backend']} attention" if server.get("attention_backend") else "",
        _speculation(server),
    ]
    load = results.plan.load
    work = (
        f"{load.prompts}, {load.output_tokens} output tokens, temperature 0; {metric_of(results)}"
    )
    return "\n".join(line for line in (", ".join(part for part in machine if part), work) if line)


def _speculation(server: Mapping[str, object]) -> str:
    parts = [
        f"{name} {server[key]}".strip()
        for name, key in (
            ("", "speculative_algorithm"),
            ("topk", "speculative_eagle_topk"),
            ("draft tokens", "speculative_num_draft_tokens"),
        )
        if server.get(key) is not None
    ]
    return ", ".join(parts)


def _looks(variants: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Variant -> colour, marker."""
    looks = {"off": (_OFF, "o"), "on": (_ON, "s")}
    others = [variant for variant in variants if variant not in looks]
    for index, variant in enumerate(others):
        looks[variant] = (_OTHERS[index % len(_OTHERS)], _MARKERS[index % len(_MARKERS)])
    return looks


def _draw_throughput(
    axes: Axes,
    results: Results,
    metric: str,
    looks: Mapping[str, tuple[str, str]],
    threshold: int | None,
) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    hollow = False
    for variant in measured_variants(results):
        colour, marker = looks[variant]
        is_reference = variant in ("on", "off")
        boots = {
            concurrency: values
            for concurrency in measured_concurrencies(results)
            if (values := values_of(results.runs, variant, concurrency, metric))
        }
        _line(
            axes,
            list(boots),
            [median(values) for values in boots.values()],
            (colour, marker),
            width=_WIDE if is_reference else _NARROW,
            layer=3 if is_reference else 4,
            label=variant,
        )
        _spread(axes, [(c, min(values), max(values)) for c, values in boots.items()], colour)
        for concurrency, values in boots.items():
            if any(refusal(level) for level in levels_of(results.runs, variant, concurrency)):
                hollow = True
                axes.plot(
                    [concurrency],
                    [median(values)],
                    color=colour,
                    marker=marker,
                    markersize=8,
                    markerfacecolor="white",
                    markeredgewidth=1.8,
                    zorder=5,
                )
    xs, ys = _envelope_outline(results, metric)
    floor = axes.get_ylim()[0]
    if xs:
        axes.fill_between(
            xs,
            ys,
            floor,
            color=_SHADE,
            linewidth=0,
            zorder=0,
            label="max(on, off)",
        )
        axes.set_ylim(bottom=floor)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", left=False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8, zorder=1)
    axes.legend(loc="upper left", frameon=False)
    if hollow:
        axes.text(
            0.985,
            0.04,
            "hollow: not usable, see the remarks",
            ha="right",
            fontsize=9.5,
            color=_GREY,
            transform=axes.transAxes,
        )
    if threshold:
        _mark_threshold(axes, threshold)
        axes.annotate(
            f"recommended N = {threshold}",
            (threshold, 1.0),
            textcoords="offset points",
            xytext=(5, -2),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize=10,
        )


def _draw_ratios(
    axes: Axes,
    items: Sequence[Ratio],
    looks: Mapping[str, tuple[str, str]],
    threshold: int | None,
) -> None:
    lowest = min(item.lowest for item in items)
    floor = _RATIO_FLOOR if lowest < _RATIO_FLOOR else min(lowest, RATIO_BAR) - 0.02
    top = max(1.0, *(item.highest for item in items)) + 0.02
    axes.axhline(1.0, color=_GREY, linewidth=1)
    axes.axhline(RATIO_BAR, color=_INK, linewidth=1.2, linestyle=(0, (1, 1.5)))
    axes.annotate(
        f"{RATIO_BAR}",
        (1.0, RATIO_BAR),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(4, 0),
        va="center",
        fontsize=10,
    )
    for variant in dict.fromkeys(item.variant for item in items):
        mine = [item for item in items if item.variant == variant]
        colour, _ = looks[variant]
        _line(
            axes,
            [item.concurrency for item in mine],
            [max(item.ratio, floor) for item in mine],
            looks[variant],
            width=_NARROW,
            layer=4,
        )
        visible = [item for item in mine if item.lowest >= floor]
        _spread(axes, [(i.concurrency, i.lowest, i.highest) for i in visible], colour)
        for item in mine:
            if item.ratio < floor:
                axes.annotate(
                    f"↓ {item.ratio:.2f}",
                    (item.concurrency, floor),
                    textcoords="offset points",
                    xytext=(0, 8),
                    ha="center",
                    fontsize=10,
                    color=colour,
                )
    if threshold:
        _mark_threshold(axes, threshold)
    axes.set_ylim(floor, top)
    axes.set_ylabel("ratio to max(on, off)")


def _envelope_outline(results: Results, metric: str) -> tuple[list[float], list[float]]:
    """The upper edge of the lines of `on` and `off` as drawn, between the levels too."""
    levels = list(envelope(results, metric))
    lines = [
        [median(values_of(results.runs, variant, c, metric)) for c in levels]
        for variant in ("on", "off")
    ]
    xs: list[float] = [*map(float, levels[:1])]
    ys = [max(line[0] for line in lines)] if levels else []
    for index in range(len(levels) - 1):
        for step in range(1, _OUTLINE_STEPS + 1):
            share = step / _OUTLINE_STEPS
            xs.append(_between(levels[index], levels[index + 1], share))
            ys.append(max(_between(line[index], line[index + 1], share) for line in lines))
    return xs, ys


def _between(low: float, high: float, share: float) -> float:
    """A straight line on logarithmic axes."""
    return float(low ** (1 - share) * high**share)


def _line(
    axes: Axes,
    xs: Sequence[int],
    ys: Sequence[float],
    look: tuple[str, str],
    width: float,
    layer: int,
    label: str | None = None,
) -> None:
    colour, marker = look
    axes.plot(
        xs,
        ys,
        color=colour,
        linewidth=width,
        marker=marker,
        markersize=5 + width,
        markeredgecolor="white",
        markeredgewidth=0.8,
        clip_on=False,
        zorder=layer,
        label=label,
    )


def _spread(axes: Axes, bars: Sequence[tuple[int, float, float]], colour: str) -> None:
    """From the lowest to the highest boot, wider than the markers so that it shows beside them."""
    xs, lows, highs = zip(*bars, strict=True) if bars else ((), (), ())
    axes.vlines(xs, lows, highs, color=colour, linewidth=13, alpha=0.3, zorder=2)


def _mark_threshold(axes: Axes, threshold: int) -> None:
    axes.axvline(threshold, color=_INK, linewidth=1, linestyle=(0, (4, 3)), zorder=2)


def _label_concurrency(axes: Axes, concurrencies: Sequence[int]) -> None:
    axes.set_xticks(list(concurrencies), [str(c) for c in concurrencies])
    axes.minorticks_off()
    axes.set_xlabel("concurrent requests")
