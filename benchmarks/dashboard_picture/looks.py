"""How the series of a panel look: colours, and kinds of line."""

from __future__ import annotations

from typing import Any

from benchmarks.dashboard_picture import PictureError
from benchmarks.dashboard_picture.queries import Drawn

# Grafana's names in the palette of Okabe and Ito, told apart with every kind of colour vision.
COLOURS = {"green": "#009E73", "orange": "#D55E00", "blue": "#0072B2", "text": "#222222"}
PALETTE = ("#0072B2", "#E69F00", "#CC79A7", "#56B4E9")


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
