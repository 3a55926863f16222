"""The time shown, and how Grafana divides it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone


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

    def ticks(self) -> range:
        """At most eleven, in seconds since the start."""
        every = next(
            (s for s in (10, 15, 30, 60, 120, 300, 600, 900, 1800) if self.length_s <= 10 * s),
            math.ceil(self.length_s / 36000) * 3600,
        )
        return range(0, self.length_s + 1, every)


def clock(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def moment(text: str) -> float:
    """Seconds since the epoch, of such a number or an ISO 8601 time, UTC unless it says else."""
    try:
        return float(text)
    except ValueError:
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
