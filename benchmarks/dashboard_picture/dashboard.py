"""The dashboard's JSON, with nothing in it that would be drawn as something else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.dashboard_picture import PictureError
from benchmarks.dashboard_picture.formats import UNITS
from benchmarks.dashboard_picture.panels import KINDS


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
    if panel["type"] not in KINDS:
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
