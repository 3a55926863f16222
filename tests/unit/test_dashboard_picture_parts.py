"""The parts of the dashboard's picture: places, lines, stretches, cells, values and times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.dashboard_picture import formats, panels
from benchmarks.dashboard_picture.frame import Frame
from benchmarks.dashboard_picture.queries import Drawn, Series
from benchmarks.dashboard_picture.times import Span, moment

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "spec_ext.json").read_text())
START, END = 1_800_000_000, 1_800_000_240


def test_panels_are_at_their_place() -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 10), dpi=100)
    panel = {"title": "t", "gridPos": {"x": 12, "y": 4, "w": 12, "h": 8}}
    frame = Frame(figure, panel, Span(START, END, 1))
    assert frame.at(0, 0) == pytest.approx((604 / 1200, 1 - (62 + 4 * 34 + 4) / 1000))
    assert (frame.wide, frame.high) == (592, 264)


def test_no_line_goes_over_steps_without_a_value() -> None:
    times, values = panels.with_gaps([0, 2, 8, 10], [1, 2, 3, 4], 2)
    assert times == [0, 2, 8, 8, 10]
    assert [str(value) for value in values] == ["1", "2", "nan", "3", "4"]


def test_stretches_of_one_state() -> None:
    series = Series("a", {}, [0, 2, 4, 10, 12], [0, 0, 1, 1, 1])
    assert panels.states(series, 2, 13) == [(0, 4, 0), (4, 6, 1), (10, 13, 1)]


def test_rows_of_a_heatmap_hold_what_is_between_their_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    cells: list[tuple[float, ...]] = []
    monkeypatch.setattr(Axes, "barh", lambda axes, *place, **look: cells.append(place))
    span = Span(0, 8, 1)
    buckets = {"+Inf": [3, 3], "8.0": [3, 2], "16.0": [3, 3], "4.0": [1, 0]}
    series = [Series(le, {"le": le}, [4, 8], counts) for le, counts in buckets.items()]
    panel = next(panel for panel in DASHBOARD["panels"] if panel["type"] == "heatmap")
    frame = Frame(Figure(figsize=(12, 10)), panel, span)
    panels.draw_heatmap(frame, Drawn(panel, series, 4))
    # row, width, height, start: one at most 4 and two up to 8, then two up to 8 and one up to 16
    assert cells == [(0, 4, 1.0, 0), (1, 4, 1.0, 0), (1, 4, 1.0, 4), (2, 4, 1.0, 4)]


@pytest.mark.parametrize(
    ("value", "short", "percent"),
    [(0.4742, "0.474", "47.4%"), (12, "12", "1200.0%"), (1234, "1.23 K", "123400.0%")],
)
def test_units(value: float, short: str, percent: str) -> None:
    assert formats.short(value) == short
    assert formats.percent(value) == percent
    assert formats.short(6.0702, 0) == "6"


def test_a_time_without_a_zone_is_utc() -> None:
    assert moment("2027-01-15T08:00:00") == START
    assert moment("2027-01-15T09:00:00+01:00") == START
    assert moment(str(START)) == START
