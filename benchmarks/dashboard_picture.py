#!/usr/bin/env python3
"""A picture of what the panels of the Grafana dashboard show, from the answers of a Prometheus.

    python benchmarks/dashboard_picture.py --prometheus http://127.0.0.1:9090 \\
        --start 2026-03-01T12:00:00Z --end 2026-03-01T12:05:00Z --out docs/grafana/dashboard.png

No Grafana takes part: this reads the dashboard's JSON and does what the JSON asks for, with each
panel's title, place, unit, colours, queries and legends. Variables stand for all their values, as
the dashboard opens. It refuses what it cannot draw, rather than draw something else.

Exit status: 0, 1 if a panel has no data (the picture is there, with "no data" in that panel), 2 if
there is no picture.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import machine
import requests

sys.path.insert(0, str(machine.ROOT))  # the package of this checkout, installed or not

from sglang_spec_ext.ops import address

DASHBOARD = machine.ROOT / "docs" / "grafana" / "spec_ext.json"
TIMEOUT_S = 30.0

# All in pixels. Grafana's grid has 24 columns.
WIDTH, COLUMNS, ROW, HEADER, GAP = 1200, 24, 34, 62, 4
TITLE, FOOT, SIDE, RIGHT = 34, 50, 52, 22
DPI = 100

# Grafana's names in the palette of Okabe and Ito, told apart with every kind of colour vision.
COLOURS = {"green": "#009E73", "orange": "#D55E00", "blue": "#0072B2", "text": "#222222"}
PALETTE = ("#0072B2", "#E69F00", "#CC79A7", "#56B4E9")
INK, GREY, GRID, PAGE, FRAME = "#222222", "#767676", "#E4E4E4", "#F4F5F5", "#D8D9DA"


class PictureError(ValueError):
    """There is no picture; the message says of what file, panel or server, and why."""


@dataclass(frozen=True)
class Span:
    """The time shown, in seconds since the epoch, and how often Prometheus scrapes."""

    start: float
    end: float
    scrape_s: float

    @property
    def length_s(self) -> int:
        return math.ceil(self.end - self.start)

    def step_s(self, points: int) -> int:
        """Grafana's $__interval for a panel of so many points."""
        return max(math.ceil(self.scrape_s), math.ceil(self.length_s / points))

    def rate_interval_s(self, step_s: int) -> int:
        return math.ceil(max(step_s + self.scrape_s, 4 * self.scrape_s))


@dataclass(frozen=True)
class Series:
    legend: str
    labels: Mapping[str, str]
    times: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class Drawn:
    """A panel with what it shows."""

    panel: Mapping[str, Any]
    series: Sequence[Series]
    step_s: int

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self.panel["fieldConfig"]["defaults"]  # type: ignore[no-any-return]

    @property
    def title(self) -> str:
        return self.panel["title"]  # type: ignore[no-any-return]


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session = address.session(self.url)

    def get(self, what: str, path: str, **params: Any) -> Any:
        """The data of an answer of the HTTP API; what: that is asked for, to name in an error."""
        try:
            answer = self._session.get(f"{self.url}{path}", params=params, timeout=TIMEOUT_S)
        except requests.Timeout:
            raise PictureError(f"{self.url} did not answer within {TIMEOUT_S:.0f} s") from None
        except requests.ConnectionError:
            raise PictureError(f"no Prometheus answers at {self.url}") from None
        except requests.RequestException as error:
            raise PictureError(f"{self.url}: {error}") from None
        try:
            body = answer.json()
            if body["status"] == "success":
                return body["data"]
            reason = body["error"]
        except (ValueError, KeyError, TypeError):
            raise PictureError(
                f"{self.url} is no Prometheus: it answers {path} with {answer.status_code} and not "
                "as Prometheus's API does"
            ) from None
        raise PictureError(f"{what}: Prometheus refuses the query: {' '.join(reason.split())}")


# ------------------------------------------------------------------------------ the dashboard


def load(path: Path) -> dict[str, Any]:
    try:
        dashboard = json.loads(path.read_text())
    except OSError as error:
        raise PictureError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise PictureError(f"{path} is no JSON: {error}") from None
    if not isinstance(dashboard, dict) or not dashboard.get("panels"):
        raise PictureError(f"{path} is no dashboard: it has no panels")
    for panel in dashboard["panels"]:
        try:
            check(panel)
        except (KeyError, TypeError, AttributeError) as error:
            raise PictureError(
                f"{path}: a panel is not as Grafana writes them, at {error}"
            ) from None
    return dashboard


def check(panel: Mapping[str, Any]) -> None:
    """Refuse what would be drawn as something else."""
    title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
    if panel["type"] not in DRAW:
        raise PictureError(f"panel {title!r}: cannot draw the type {panel['type']!r}")
    if (unit := defaults.get("unit", "none")) not in UNITS:
        raise PictureError(f"panel {title!r}: does not know the unit {unit!r}")
    if not all(panel["gridPos"][side] >= 0 for side in "xywh"):
        raise PictureError(f"panel {title!r}: its place is outside the page")
    if not all(target["expr"] for target in panel["targets"]):
        raise PictureError(f"panel {title!r}: a query is empty")
    for override in panel["fieldConfig"].get("overrides", ()):
        if override["matcher"]["id"] != "byName":
            raise PictureError(f"panel {title!r}: an override matches by other than the name")
        for each in override["properties"]:
            if each["id"] not in ("color", "custom.lineStyle"):
                raise PictureError(f"panel {title!r}: cannot draw the override {each['id']!r}")


def resolve(dashboard: Mapping[str, Any], prometheus: Prometheus, span: Span) -> dict[str, str]:
    """Each query variable as the pattern of all its values."""
    values: dict[str, str] = {}
    for variable in dashboard.get("templating", {}).get("list", ()):
        if variable.get("type") == "datasource":
            continue
        name, query = variable.get("name", ""), variable.get("definition", "")
        asked = re.fullmatch(r"label_values\((.+), *(\w+)\)", query)
        if variable.get("type") != "query" or asked is None:
            raise PictureError(f"variable {name}: can only follow label_values(series, label)")
        found = prometheus.get(
            f"variable {name}",
            f"/api/v1/label/{asked[2]}/values",
            **{"match[]": expand(asked[1], values), "start": span.start, "end": span.end},
        )
        if not found:
            raise PictureError(
                f"variable {name}: {expand(query, values)} finds nothing in this time; does this "
                "Prometheus scrape a server that was started with --enable-metrics?"
            )
        # Once escaped for the pattern, once more for the string in the query.
        patterns = [re.sub(r"([.?*+^$()\[\]{}|\\])", r"\\\\\1", value) for value in sorted(found)]
        values[name] = patterns[0] if len(patterns) == 1 else f"({'|'.join(patterns)})"
        print(f"${name} = {', '.join(sorted(found))}")
    return values


def expand(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        try:
            return values[match[1]]
        except KeyError:
            raise PictureError(f"${match[1]} has no value, in {text}") from None

    return re.sub(r"\$(\w+)", value, text)


def ask(
    panel: Mapping[str, Any], variables: Mapping[str, str], prometheus: Prometheus, span: Span
) -> Drawn:
    step = span.step_s(panel.get("maxDataPoints") or panel["gridPos"]["w"] * WIDTH // COLUMNS)
    values = {
        **variables,
        "__interval": f"{step}s",
        "__rate_interval": f"{span.rate_interval_s(step)}s",
        "__range": f"{span.length_s}s",
    }
    series: list[Series] = []
    for target in panel["targets"]:
        answer = prometheus.get(
            f"panel {panel['title']!r}",
            "/api/v1/query_range",
            query=expand(target["expr"], values),
            start=span.start,
            end=span.end,
            step=step,
        )
        for each in answer["result"]:
            # 0 / 0 is NaN: a share or a mean of nothing is no data.
            points = [(at, float(value)) for at, value in each["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points:
                labels = each["metric"]
                legend = legend_of(target.get("legendFormat", ""), labels)
                series.append(Series(legend, labels, *map(list, zip(*points, strict=True))))
    return Drawn(panel, series, step)


def legend_of(form: str, labels: Mapping[str, str]) -> str:
    if not form:
        own = ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
        return f"{{{own}}}"
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda match: labels.get(match[1], ""), form)


def short(value: float, decimals: int | None = None) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if abs(value) >= size:
            return f"{value / size:.{2 if decimals is None else decimals}f}{letter}"
    return f"{value:.3g}" if decimals is None else f"{value:.{decimals}f}"


def percent(value: float, decimals: int | None = None) -> str:
    return f"{100 * value:.{1 if decimals is None else decimals}f}%"


UNITS: Mapping[str, Callable[..., str]] = {"none": short, "short": short, "percentunit": percent}


def format_of(drawn: Drawn) -> Callable[[float], str]:
    write, decimals = UNITS[drawn.defaults.get("unit", "none")], drawn.defaults.get("decimals")
    return lambda value: write(value, decimals)


# ------------------------------------------------------------------------------- the picture


class Frame:
    """A panel's place on the page, in pixels from the upper left corner."""

    def __init__(self, figure: Any, panel: Mapping[str, Any], span: Span) -> None:
        from matplotlib.patches import Rectangle

        grid, column = panel["gridPos"], WIDTH / COLUMNS
        self.figure, self.span = figure, span
        self.height = figure.get_figheight() * DPI
        self.left, self.top = grid["x"] * column + GAP, HEADER + grid["y"] * ROW + GAP
        self.wide, self.high = grid["w"] * column - 2 * GAP, grid["h"] * ROW - 2 * GAP
        x, y = self.at(0, self.high)
        figure.add_artist(
            Rectangle(
                (x, y),
                self.wide / WIDTH,
                self.high / self.height,
                facecolor="white",
                edgecolor=FRAME,
                linewidth=0.8,
                zorder=-1,
            )
        )
        self.text(12, 17, panel["title"], fontsize=10.5, fontweight="bold", va="center")

    def at(self, right: float, down: float) -> tuple[float, float]:
        """Pixels from this panel's corner, as shares of the figure."""
        return (self.left + right) / WIDTH, 1 - (self.top + down) / self.height

    def text(self, right: float, down: float, text: str, **look: Any) -> None:
        self.figure.text(*self.at(right, down), text, **look)

    def axes(self, side: float = SIDE) -> Any:
        """Over the time shown, in what title and legend leave."""
        x, y = self.at(side, self.high - FOOT)
        wide, high = self.wide - side - RIGHT, self.high - TITLE - FOOT
        axes = self.figure.add_axes((x, y, wide / WIDTH, high / self.height))
        axes.set_xlim(self.span.start, self.span.end)
        every = next(
            (s for s in (10, 15, 30, 60, 120, 300, 600, 900, 1800) if self.span.length_s <= 10 * s),
            math.ceil(self.span.length_s / 36000) * 3600,
        )
        ticks = range(0, self.span.length_s + 1, every)
        axes.set_xticks([self.span.start + tick for tick in ticks], list(map(clock, ticks)))
        axes.tick_params(length=0, labelsize=8.5, labelcolor=GREY)
        axes.tick_params(axis="x", pad=6)
        axes.spines[:].set_visible(False)
        return axes

    def legend(self, handles: Sequence[Any], labels: Sequence[str]) -> None:
        self.figure.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=self.at(4, self.high + 1),
            ncols=len(labels),
            frameon=False,
            fontsize=9,
            handlelength=1.6,
            columnspacing=1.4,
        )


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def colour(name: str, panel: str) -> str:
    try:
        return COLOURS[name]
    except KeyError:
        raise PictureError(f"panel {panel!r}: does not know the colour {name!r}") from None


def looks(drawn: Drawn) -> list[dict[str, Any]]:
    """Colour and kind of line of each series: what the dashboard says, or the next colour."""
    result = []
    for place, series in enumerate(drawn.series):
        look: dict[str, Any] = {"color": PALETTE[place % len(PALETTE)]}
        for override in drawn.panel["fieldConfig"].get("overrides", ()):
            if override["matcher"]["options"] != series.legend:
                continue
            for each in override["properties"]:
                if each["id"] == "color":
                    look["color"] = colour(each["value"]["fixedColor"], drawn.title)
                elif each["value"]["fill"] == "dash":
                    look["linestyle"] = (0, (3, 2))
        result.append(look)
    return result


def draw_timeseries(frame: Frame, drawn: Drawn) -> None:
    axes = frame.axes()
    custom = drawn.defaults.get("custom", {})
    opacity = custom.get("fillOpacity", 0) / 100
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    below: dict[float, float] = {}
    handles: list[Any] = []
    for series, look in zip(drawn.series, looks(drawn), strict=True):
        floor = [below.get(at, 0.0) for at in series.times]
        values = list(series.values)
        if stacked:
            values = [value + base for value, base in zip(values, floor, strict=True)]
            below.update(zip(series.times, values, strict=True))
        line = with_gaps(series.times, values, drawn.step_s)
        if opacity:
            _, under = with_gaps(series.times, floor, drawn.step_s)
            axes.fill_between(*line, under, color=look["color"], alpha=opacity, linewidth=0)
        # In a stack, a series that is 0 must not hide the edge of the one below it.
        layer = 3 - 0.01 * len(handles) if stacked else 3
        handles += axes.plot(*line, linewidth=1.5, zorder=layer, **look)
    low, high = axes.get_ylim()
    axes.set_ylim(drawn.defaults.get("min", low), high)
    axes.locator_params(axis="y", nbins=6)
    axes.yaxis.set_major_formatter(lambda value, _: format_of(drawn)(value))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
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
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
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
        text = format_of(drawn)(series.values[-1])
        look = {"fontsize": 26, "fontweight": "bold", "ha": "center", "va": "center"}
        frame.text(middle, 0.6 * frame.high, text, color=ink, **look)


DRAW: Mapping[str, Callable[[Frame, Drawn], None]] = {
    "timeseries": draw_timeseries,
    "state-timeline": draw_states,
    "heatmap": draw_heatmap,
    "stat": draw_stat,
}


def draw(title: str, about: str, panels: Sequence[Drawn], span: Span, out: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise PictureError(
            "the picture needs matplotlib: pip install 'sglang-spec-ext[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = max(each.panel["gridPos"]["y"] + each.panel["gridPos"]["h"] for each in panels)
    height = HEADER + rows * ROW + GAP
    with matplotlib.rc_context({"text.color": INK, "font.size": 10}):
        figure = pyplot.figure(figsize=(WIDTH / DPI, height / DPI), facecolor=PAGE)
        try:
            figure.text(12 / WIDTH, 1 - 20 / height, title, fontsize=14, weight="bold", va="center")
            figure.text(12 / WIDTH, 1 - 46 / height, about, fontsize=9.5, color=GREY, va="center")
            for each in panels:
                frame = Frame(figure, each.panel, span)
                if each.series:
                    try:
                        DRAW[each.panel["type"]](frame, each)
                    except KeyError as error:
                        raise PictureError(f"panel {each.title!r} has no {error}") from None
                else:
                    look = {"color": GREY, "ha": "center", "va": "center", "fontsize": 12}
                    frame.text(frame.wide / 2, 0.55 * frame.high, "no data", **look)
            figure.savefig(out, dpi=DPI)
        except OSError as error:
            raise PictureError(f"{out}: {error.strerror}") from None
        finally:
            pyplot.close(figure)


def moment(text: str) -> float:
    """Seconds since the epoch, of such a number or an ISO 8601 time, UTC unless it says else."""
    try:
        return float(text)
    except ValueError:
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    when: dict[str, Any] = {"type": moment, "required": True, "metavar": "TIME"}
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--start", **when, help="ISO 8601, or seconds since the epoch")
    parser.add_argument("--end", **when)
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD, metavar="JSON")
    parser.add_argument(
        "--scrape-interval",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="that of the Prometheus, as Grafana's data source is told it (default: 15, as there)",
    )
    options = parser.parse_args(arguments)
    span = Span(options.start, options.end, options.scrape_interval)
    try:
        if not span.start < span.end or not span.scrape_s > 0:
            raise PictureError("--end must be after --start, and --scrape-interval above 0")
        dashboard = load(options.dashboard)
        prometheus = Prometheus(options.prometheus)
        variables = resolve(dashboard, prometheus, span)
        panels = [ask(panel, variables, prometheus, span) for panel in dashboard["panels"]]
        begin = datetime.fromtimestamp(span.start, timezone.utc)
        chosen = "   ".join(f"{name}: {value}" for name, value in variables.items())
        about = f"{chosen}   time since {begin:%Y-%m-%d %H:%M:%S} UTC"
        draw(dashboard["title"], about.replace("\\", ""), panels, span, options.out)
    except PictureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.out)
    empty = [each.title for each in panels if not each.series]
    if empty:
        print(f"error: no data in {', '.join(map(repr, empty))}", file=sys.stderr)
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
