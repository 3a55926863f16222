"""Which of SGLang's speculative workers a server runs, and what we touch around it.

Some releases have two for the same algorithms: spec-v2, which overlaps its steps with the
scheduler's, and spec-v1, which does not. A release is told by what it has, as everything in
`compat` is, and the worker by the resolved arguments.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sglang_spec_ext.compat import contracts, contracts_v1, releases
from sglang_spec_ext.compat.contracts import ARGUMENT_SEAM, LOADING, LOADING_CALLED, TouchPoint

Worker = Literal["spec-v1", "spec-v2"]

WORKER_KIND_ENV = "SGLANG_SPEC_EXT_WORKER_KIND"
"""The launcher tells its scheduler processes which of two workers they run."""


@dataclass(frozen=True)
class Contract:
    """All that we touch around one worker, in the releases that are alike in it.

    Attributes:
        worker: the speculative worker that we step in for.
        releases: those that it is known to hold in, for messages.
        told_by: names of touch points of which a release with this worker has a place.
        launcher, scheduler: hooked there.
        called: called or read, never wrapped.
    """

    worker: Worker
    releases: tuple[str, ...]
    told_by: tuple[str, ...]
    launcher: tuple[TouchPoint, ...]
    scheduler: tuple[TouchPoint, ...]
    called: tuple[TouchPoint, ...]

    @property
    def points(self) -> tuple[TouchPoint, ...]:
        loading = LOADING + LOADING_CALLED
        return ARGUMENT_SEAM + self.launcher + self.scheduler + loading + self.called

    def is_told(self, site: Path) -> bool:
        """Whether the sources under ``site`` have this worker."""
        return all(contracts.holding(name, site, self.points) for name in self.told_by)


V2 = Contract(
    "spec-v2",
    releases.span(contracts.OLDEST_RELEASE, contracts.NEWEST_RELEASE),
    ("forward_batch_generation",),
    contracts.LAUNCHER,
    contracts.SCHEDULER,
    contracts.CALLED,
)
V1 = Contract(
    "spec-v1",
    releases.span("0.5.12.post1", "0.5.12.post1"),
    ("forward_batch_generation_v1", "launch_subprocesses", "extend_input"),
    contracts_v1.LAUNCHER,
    contracts_v1.SCHEDULER,
    contracts_v1.LAST_CALLED,
)
EARLY_V1 = Contract(
    "spec-v1",
    releases.span("0.5.10.post1", "0.5.11"),
    ("forward_batch_generation_v1", "launch_subprocesses", "verified_id"),
    contracts_v1.LAUNCHER,
    contracts_v1.EARLY_SCHEDULER,
    contracts_v1.EARLY_CALLED,
)
FIRST_V1 = Contract(
    "spec-v1",
    releases.span("0.5.9", "0.5.9"),
    ("forward_batch_generation_v1", "launch_subprocesses_function"),
    contracts_v1.FIRST_LAUNCHER,
    contracts_v1.FIRST_SCHEDULER,
    contracts_v1.CALLED,
)
CONTRACTS = (V2, V1, EARLY_V1, FIRST_V1)


def told(site: Path | None = None) -> tuple[Contract, ...]:
    """The contracts of the workers that the sources under ``site`` have, newest worker first.

    Args:
        site: directory that contains ``sglang/``; default the one that would be imported.
    """
    return _told(site or contracts.site_dir())


@cache
def _told(site: Path | None) -> tuple[Contract, ...]:
    return () if site is None else tuple(known for known in CONTRACTS if known.is_told(site))


def contract(site: Path | None = None) -> Contract:
    """The contract of the worker in use; before that is known, of one that would do.

    In a scheduler process it is what the launcher says; elsewhere the newest worker whose contract
    holds, and where none does, the one that lacks the least.
    """
    kind = os.environ.get(WORKER_KIND_ENV)
    for known in told(site):
        if known.worker == kind:
            return known
    return _closest(site or contracts.site_dir())


@cache
def _closest(site: Path | None) -> Contract:
    candidates = _told(site)
    if len(candidates) < 2:
        return candidates[0] if candidates else V2
    return min(candidates, key=lambda known: len(contracts.check(site, known.points)))


def of(arguments: Any) -> Contract:
    """The contract of the worker that a server with these resolved arguments runs."""
    candidates = told()
    if len(candidates) < 2:
        return contract()
    kind = "spec-v1" if arguments.disable_overlap_schedule else "spec-v2"
    return next(known for known in candidates if known.worker == kind)


def unfit(arguments: Any) -> Contract | None:
    """That contract, if the release has another worker and this one is not as we need it."""
    chosen = of(arguments)
    return chosen if len(told()) > 1 and contracts.check(points=chosen.points) else None


def unfit_in(release: str, arguments: Any) -> Contract | None:
    """The same in a release that need not be installed, by what is known of it."""
    v2_fits = release in V2.releases
    return None if v2_fits or arguments.disable_overlap_schedule else V2


def to_env(arguments: Any) -> dict[str, str]:
    """What tells the processes of a server with these resolved arguments which worker it runs."""
    return {WORKER_KIND_ENV: of(arguments).worker} if len(told()) > 1 else {}


def check(site: Path | None = None) -> list[str]:
    """Sentences for what does not hold in the sources under ``site``; empty when all does."""
    return contracts.check(site, contract(site).points)


def holding(name: str, site: Path | None = None) -> TouchPoint | None:
    """The place of touch point ``name`` around the worker in use, None if there is none."""
    return contracts.holding(name, site, contract(site).points)


def hooked(site: Path) -> tuple[TouchPoint, ...]:
    """All that we hook in the sources under ``site``, around each worker whose contract holds."""
    found: dict[str, TouchPoint] = {}
    for known in told(site):
        if not contracts.check(site, known.points):
            points = ARGUMENT_SEAM + known.launcher + known.scheduler + LOADING
            for point in contracts.in_use(points, site):
                found.setdefault(point.target, point)  # workers share most of them
    return tuple(found.values())


def seams(site: Path | None = None) -> dict[str, bool]:
    """For each target that we hook, whether the diffs of `patches/` have put a seam on it."""
    site = site or contracts.site_dir()
    return {} if site is None else {p.target: contracts.seamed(p, site) for p in hooked(site)}


def supported() -> str:
    """The releases that can work, for a message."""
    kinds: dict[str, set[str]] = {}
    for known in reversed(CONTRACTS):
        kinds.setdefault(known.worker, set()).update(known.releases)
    return " and ".join(f"{releases.describe(them)} ({kind})" for kind, them in kinds.items())
