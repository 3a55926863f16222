"""Values as Grafana writes them in its units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


def short(value: float, decimals: int | None = None) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if abs(value) >= size:
            return f"{value / size:.{2 if decimals is None else decimals}f}{letter}"
    return f"{value:.3g}" if decimals is None else f"{value:.{decimals}f}"


def percent(value: float, decimals: int | None = None) -> str:
    return f"{100 * value:.{1 if decimals is None else decimals}f}%"


UNITS: Mapping[str, Callable[..., str]] = {"none": short, "short": short, "percentunit": percent}


def format_of(defaults: Mapping[str, Any]) -> Callable[[float], str]:
    """By the ``defaults`` of a panel's fields."""
    return partial(UNITS[defaults.get("unit", "none")], decimals=defaults.get("decimals"))
