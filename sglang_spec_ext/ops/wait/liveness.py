"""Hung, slow or healthy: what counts as a sign of life, and how long each phase may go without."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_spec_ext.ops.wait.patterns import Phase

SILENCE_WORTH_A_WORD = 20.0  # seconds
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Budget:
    """How long a phase may show nothing, in seconds.

    ``silent``: not even CPU time. ``busy``: CPU time is used but nothing comes of it. Ranks that
    wait for a dead one spin at full speed, so CPU time cannot excuse a silence for ever.
    """

    silent: float
    busy: float


BUDGETS: dict[Phase, Budget] = {
    Phase.BLIND: Budget(900, math.inf),  # without a log CPU time is all there is to see
    Phase.LOG: Budget(120, 600),
    Phase.ARGUMENTS: Budget(180, 600),  # imports from a cold network disk take minutes
    Phase.DISTRIBUTED: Budget(180, 660),  # NCCL itself gives up after 600
    Phase.TARGET_WEIGHTS: Budget(300, 1800),
    Phase.DRAFT_WEIGHTS: Budget(300, 1800),
    Phase.POOL: Budget(120, 600),
    Phase.GRAPHS: Budget(300, 1200),
    Phase.DRAFT_POOL: Budget(120, 600),
    Phase.DRAFT_GRAPHS: Budget(300, 1200),
    Phase.HTTP: Budget(180, 600),
    Phase.WARM_UP: Budget(180, 660),  # SGLang's own warm-up request gives up after 600
    Phase.FIRST_TOKEN: Budget(120, 300),
}
COMPILING = Budget(900, 3600)
# Nobody can see CPU time where there is no process to look at.
WITHOUT_PROCESS = 2.0


@dataclass(frozen=True)
class Vitals:
    """One look at the server's processes.

    ``started_at`` is when the process was started, on the caller's clock. ``schedulers`` run,
    ``lost`` were seen running. ``cpu_seconds`` and ``read_bytes`` are sums over the process tree,
    ``gpu_bytes`` is None where it was not asked.
    """

    alive: bool
    started_at: float | None = None
    exit_code: int | None = None
    schedulers: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    read_bytes: int = 0
    gpu_bytes: int | None = None
    compilers: tuple[str, ...] = ()
    oom_kills: int = 0


class Liveness:
    """When the boot last moved, and what excuses that it does not."""

    def __init__(self, now: float) -> None:
        self.moved_at = now
        self._busy_at = now
        self._before: Vitals | None = None
        self._gpu_bytes: int | None = None
        self._excuse = ""

    def moved(self, at: float) -> None:
        """Something has come of the work."""
        self.moved_at = max(self.moved_at, at)

    def next_phase(self) -> None:
        self._excuse = ""

    def excuse(self, words: str) -> None:
        self._excuse = words

    def look(self, vitals: Vitals, at: float) -> None:
        """Compare with the look before."""
        before, self._before = self._before, vitals
        if vitals.compilers:
            self.moved(at)
            self._excuse = f"compiling kernels ({', '.join(vitals.compilers)})"
        if before is None:
            return
        if vitals.gpu_bytes is not None:
            change = abs(vitals.gpu_bytes - (self._gpu_bytes or 0))
            if self._gpu_bytes is not None and change >= MEGABYTE:
                self.moved(at)
                self._excuse = f"GPU memory moves ({change // MEGABYTE} MB)"
            self._gpu_bytes = vitals.gpu_bytes
        read = vitals.read_bytes - before.read_bytes
        if read >= MEGABYTE:
            self.moved(at)
            self._excuse = f"reading from disk, {read // MEGABYTE} MB since the last look"
        if vitals.cpu_seconds - before.cpu_seconds > 0.05:
            self._busy_at = at
            self._excuse = self._excuse or "busy on the CPU"

    def slow(self, now: float) -> str:
        """Why a silence need not worry; empty when there is none or nothing excuses it."""
        return self._excuse if now - self.moved_at > SILENCE_WORTH_A_WORD else ""

    def why(self) -> str:
        """The last thing that was seen to be going on, whenever that was."""
        return self._excuse

    def overdue(self, now: float, budget: Budget) -> tuple[bool, float, bool]:
        """Whether the budget is spent, seconds since anything moved, and if the CPU was busy."""
        silent_for = now - self.moved_at
        idle_for = now - max(self.moved_at, self._busy_at)
        hung = idle_for > budget.silent or silent_for > budget.busy
        return hung, silent_for, idle_for <= budget.silent
