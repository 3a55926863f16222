"""Grafana's variables, in the queries of variables and panels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.dashboard_picture import PictureError
from benchmarks.dashboard_picture.prometheus import Prometheus
from benchmarks.dashboard_picture.times import Span


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
    try:
        return re.sub(r"\$(\w+)", lambda match: values[match[1]], text)
    except KeyError as error:
        raise PictureError(f"${error.args[0]} has no value, in {text}") from None
