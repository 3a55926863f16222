"""A picture of what the panels of the Grafana dashboard show, from the answers of a Prometheus.

    python -m benchmarks.dashboard_picture --prometheus http://127.0.0.1:9090 \\
        --start 2026-03-01T12:00:00Z --end 2026-03-01T12:05:00Z --out docs/grafana/dashboard.png

No Grafana takes part: this reads the dashboard's JSON and does what the JSON asks for, with each
panel's title, place, unit, colours, queries and legends. Variables stand for all their values, as
the dashboard opens. It refuses what it cannot draw, rather than draw something else.

Exit status: 0, 1 if a panel has no data (the picture is there, with "no data" in that panel), 2 if
there is no picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.dashboard_picture import PictureError, dashboard, page, variables
from benchmarks.dashboard_picture.prometheus import Prometheus
from benchmarks.dashboard_picture.queries import ask
from benchmarks.dashboard_picture.times import Span, moment

DASHBOARD = machine.ROOT / "docs" / "grafana" / "spec_ext.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboard_picture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        read = dashboard.load(options.dashboard)
        prometheus = Prometheus(options.prometheus)
        values = variables.resolve(read, prometheus, span)
        panels = [ask(panel, values, prometheus, span) for panel in read["panels"]]
        page.draw(read["title"], values, panels, span, options.out)
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
