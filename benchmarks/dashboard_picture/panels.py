"""The kinds of panels: how each draws what it shows into its frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.dashboard_picture import PictureError
from benchmarks.dashboard_picture.formats import format_of, short
from benchmarks.dashboard_picture.frame import GREY, Frame
from benchmarks.dashboard_picture.looks import colour, looks
from benchmarks.dashboard_picture.queries import Drawn, Series


def draw(frame: Frame, drawn: Drawn) -> None:
    if not drawn.series:
        look = {"color": GREY, "ha": "center", "va": "center", "fontsize": 12}
        frame.text(frame.wide / 2, 0.55 * frame.high, "no data", **look)
        return
    try:
        KINDS[drawn.panel["type"]](frame, drawn)
    except KeyError as error:
        raise PictureError(f"panel {drawn.title!r} has no {error}") from None


def draw_timeseries(frame: Frame, drawn: Drawn) -> None:
    axes = frame.axes()
    custom = drawn.defaults.get("custom", {})
    opacity = custom.get("fillOpacity", 0) / 100
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    below: dict[float, float] = {}
    handles: list[Any] = []
    for series, look in zip(drawn.series, looks(drawn), strict=True):
        floor = [below.get(at, 0.0) for at in series.times]
        values = [value + base for value, base in zip(series.values, floor, strict=True)]
        if stacked:
            below.update(zip(series.times, values, strict=True))
        line = with_gaps(series.times, values, drawn.step_s)
        if opacity:
            _, under = with_gaps(series.times, floor, drawn.step_s)
            axes.fill_between(*line, under, color=look["color"], alpha=opacity, linewidth=0)
        # In a stack, a series that is 0 must not hide the edge of the one below it.
        layer = 3 - 0.01 * len(handles) if stacked else 3
        handles += axes.plot(*line, linewidth=1.5, zorder=layer, **look)
    axes.set_ylim(bottom=drawn.defaults.get("min"))
    axes.locator_params(axis="y", nbins=6)
    write = format_of(drawn.defaults)
    axes.yaxis.set_major_formatter(lambda value, _: write(value))
    axes.grid(True)
    frame.legend(handles, [series.legend for series in drawn.series])


def with_gaps(
    times: Sequence[float], values: Sequence[float], step_s: float
) -> tuple[list[float], list[float]]:
    """No line where steps had no value."""
    xs: list[float] = []
    ys: list[float] = []
    for at, value in zip(times, values, strict=True):
        if xs and at - xs[-1] > 1.5 * step_s:
            xs.append(at)
            ys.append(math.nan)
        xs.append(at)
        ys.append(value)
    return xs, ys


def draw_states(frame: Frame, drawn: Drawn) -> None:
    from matplotlib.patches import Patch

    texts: dict[str, Mapping[str, str]] = {}
    for mapping in drawn.defaults.get("mappings", ()):
        texts |= mapping["options"]
    axes = frame.axes(side=18 + 6.8 * max(len(series.legend) for series in drawn.series))
    axes.set_yticks(range(len(drawn.series)), [series.legend for series in drawn.series])
    axes.set_ylim(len(drawn.series) - 0.5, -0.5)
    for row, series in enumerate(drawn.series):
        for start, end, value in states(series, drawn.step_s, frame.span.end):
            state = texts.get(f"{value:g}")
            if state is None:
                raise PictureError(f"panel {drawn.title!r}: no text for the value {value:g}")
            fill = colour(state["color"], drawn.title)
            axes.barh(row, end - start, 0.8, start, color=fill, edgecolor="white", linewidth=0.6)
            if end - start > 0.08 * frame.span.length_s:
                look = {"color": "white", "fontsize": 8.5, "ha": "center", "va": "center"}
                axes.text((start + end) / 2, row, state["text"], **look)
    shown = {f"{value:g}" for series in drawn.series for value in series.values}
    named = [state for value, state in texts.items() if value in shown]
    patches = [Patch(color=colour(state["color"], drawn.title)) for state in named]
    frame.legend(patches, [state["text"] for state in named])


def states(series: Series, step_s: float, until: float) -> list[tuple[float, float, float]]:
    """Start, end and value of each stretch of one value; a missing step ends one."""
    found: list[tuple[float, float, float]] = []
    for at, value in zip(series.times, series.values, strict=True):
        end = min(at + step_s, until)
        if found and found[-1][2] == value and at - found[-1][1] < 0.5 * step_s:
            found[-1] = (found[-1][0], end, value)
        else:
            found.append((at, end, value))
    return found


def draw_heatmap(frame: Frame, drawn: Drawn) -> None:
    import matplotlib

    if any("le" not in series.labels for series in drawn.series):
        raise PictureError(f"panel {drawn.title!r}: a heatmap needs the buckets' label le")
    ordered = sorted(drawn.series, key=lambda series: float(series.labels["le"]))
    cells, before = [], dict[float, float]()
    for row, series in enumerate(ordered):
        now = dict(zip(series.times, series.values, strict=True))
        # Buckets count what is at or below their bound: the next lower one is within.
        for at, value in now.items():
            if (count := value - before.get(at, 0.0)) > 1e-9:
                cells.append((row, at, count))
        before = now
    axes = frame.axes()
    axes.set_ylim(-0.5, len(ordered) - 0.5)
    axes.set_yticks(range(len(ordered)), [series.legend for series in ordered], fontsize=7)
    axes.grid(True, axis="y")
    map_of = matplotlib.colormaps[drawn.panel["options"]["color"]["scheme"]]
    most = max((count for _, _, count in cells), default=1.0)
    for row, at, count in cells:
        shade = map_of(0.25 + 0.75 * count / most)
        axes.barh(row, drawn.step_s, 1.0, at - drawn.step_s, color=shade, linewidth=0)
    note = f"darkest: {short(most)} in {drawn.step_s} s; rows by upper bound"
    frame.text(14, frame.high - 13, note if cells else "none in this time", fontsize=9, va="center")


def draw_stat(frame: Frame, drawn: Drawn) -> None:
    ink = colour(drawn.defaults.get("color", {}).get("fixedColor", "green"), drawn.title)
    for place, series in enumerate(drawn.series):
        middle = frame.wide * (place + 0.5) / len(drawn.series)
        text = format_of(drawn.defaults)(series.values[-1])
        look = {"fontsize": 26, "fontweight": "bold", "ha": "center", "va": "center"}
        frame.text(middle, 0.6 * frame.high, text, color=ink, **look)


KINDS: Mapping[str, Callable[[Frame, Drawn], None]] = {
    "timeseries": draw_timeseries,
    "state-timeline": draw_states,
    "heatmap": draw_heatmap,
    "stat": draw_stat,
}
