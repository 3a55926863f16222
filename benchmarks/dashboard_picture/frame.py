"""The place of a panel on the page, and of what is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.dashboard_picture.times import Span, clock

# All in pixels. Grafana's grid has 24 columns.
WIDTH, COLUMNS, ROW, HEADER, GAP = 1200, 24, 34, 62, 4
TITLE, FOOT, SIDE, RIGHT = 34, 50, 52, 22
DPI = 100
GREY, GRID, BORDER = "#767676", "#E4E4E4", "#D8D9DA"


class Frame:
    """A panel's place on the page, in pixels from the upper left corner."""

    def __init__(self, figure: Any, panel: Mapping[str, Any], span: Span) -> None:
        from matplotlib.patches import Rectangle

        grid, column = panel["gridPos"], WIDTH / COLUMNS
        self.figure, self.span = figure, span
        self.height = figure.get_figheight() * DPI
        self.left, self.top = grid["x"] * column + GAP, HEADER + grid["y"] * ROW + GAP
        self.wide, self.high = grid["w"] * column - 2 * GAP, grid["h"] * ROW - 2 * GAP
        size = self.wide / WIDTH, self.high / self.height
        box = Rectangle(self.at(0, self.high), *size, fc="white", ec=BORDER, lw=0.8, zorder=-1)
        figure.add_artist(box)
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
        ticks = self.span.ticks()
        axes.set_xticks([self.span.start + tick for tick in ticks], list(map(clock, ticks)))
        axes.tick_params(length=0, labelsize=8.5, labelcolor=GREY)
        axes.tick_params(axis="x", pad=6)
        axes.tick_params(grid_color=GRID, grid_linewidth=0.8)
        axes.set_axisbelow(True)
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
