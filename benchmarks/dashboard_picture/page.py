"""The page: its heading, and a frame for each panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.dashboard_picture import PictureError, panels
from benchmarks.dashboard_picture.frame import DPI, GAP, GREY, HEADER, ROW, WIDTH, Frame
from benchmarks.dashboard_picture.queries import Drawn
from benchmarks.dashboard_picture.times import Span

INK, PAGE = "#222222", "#F4F5F5"


def draw(
    title: str, variables: Mapping[str, str], shown: Sequence[Drawn], span: Span, out: Path
) -> None:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise PictureError(
            "the picture needs matplotlib: pip install 'sglang-spec-ext[bench]'"
        ) from None

    begin = datetime.fromtimestamp(span.start, timezone.utc)
    chosen = "   ".join(f"{name}: {value}" for name, value in variables.items())
    about = f"{chosen}   time since {begin:%Y-%m-%d %H:%M:%S} UTC".replace("\\", "")
    rows = max(each.panel["gridPos"]["y"] + each.panel["gridPos"]["h"] for each in shown)
    height = HEADER + rows * ROW + GAP
    with rc_context({"text.color": INK, "font.size": 10}):
        figure = Figure(figsize=(WIDTH / DPI, height / DPI), facecolor=PAGE)
        figure.text(12 / WIDTH, 1 - 20 / height, title, fontsize=14, weight="bold", va="center")
        figure.text(12 / WIDTH, 1 - 46 / height, about, fontsize=9.5, color=GREY, va="center")
        for each in shown:
            panels.draw(Frame(figure, each.panel, span), each)
        try:
            figure.savefig(out, dpi=DPI)
        except OSError as error:
            raise PictureError(f"{out}: {error.strerror}") from None
