"""What a panel shows: the answers to its queries, under its legends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.dashboard_picture.frame import COLUMNS, WIDTH
from benchmarks.dashboard_picture.prometheus import Prometheus
from benchmarks.dashboard_picture.times import Span
from benchmarks.dashboard_picture.variables import expand


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
        return self.panel["fieldConfig"]["defaults"]

    @property
    def title(self) -> str:
        return self.panel["title"]


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
