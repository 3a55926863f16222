"""Drive the pure core of `wait` with a written log and a clock of our own: no sleeping, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from wait_logs import At

from sglang_spec_ext.ops.wait.boot import BootState, Verdict
from sglang_spec_ext.ops.wait.liveness import Vitals
from sglang_spec_ext.ops.wait.reader import LogReader


@dataclass
class Replay:
    """A boot in fake time. ``vitals`` and ``health`` are asked at every look."""

    boot: BootState = field(default_factory=lambda: BootState(0.0))
    reader: LogReader = field(default_factory=LogReader)
    vitals: Callable[[float], Vitals] | None = None
    health: Callable[[float], str] = lambda _: "refused"
    token_error: Callable[[float], str] = lambda _: ""
    now: float = 0.0
    phases: list[str] = field(default_factory=list)

    def run(self, lines: Iterable[At], then: float = 0.0, step: float = 1.0) -> Verdict | None:
        """Feed the lines at their times, then ``then`` seconds of silence; the first verdict."""
        for line in lines:
            while self.now + step < line.second:
                self.now += step
                if (verdict := self.look()) is not None:
                    return verdict
            self.now = max(self.now, line.second)
            self.boot.on_records(self.reader.feed(line.data), self.now)
            self.boot.on_growth(self.reader.take_growth(), self.now)
            if (verdict := self.look(settle=False)) is not None:
                return verdict
        end = self.now + then
        while self.now < end:
            self.now += step
            if (verdict := self.look()) is not None:
                return verdict
        return None

    def look(self, settle: bool = True) -> Verdict | None:
        if settle:
            self.boot.on_records(self.reader.settle(), self.now)
        if self.vitals is not None:
            self.boot.on_vitals(self.vitals(self.now), self.now)
        self.boot.on_health(self.health(self.now), self.now)
        if self.boot.wants_first_token:
            self.boot.on_probe(self.token_error(self.now), self.now)
        if self.boot.phase.value not in self.phases:
            self.phases.append(self.boot.phase.value)
        return self.boot.verdict(self.now, tuple(self.reader.last_lines()))


def healthy_after(second: float) -> Callable[[float], str]:
    return lambda now: "ok" if now >= second else "starting"
