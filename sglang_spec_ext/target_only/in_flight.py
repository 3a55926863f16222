"""On the spec-v1 worker: the scheduler commits one target-only step while the GPU runs the next.

SGLang gives that worker no overlap schedule, because a verify has to know its tokens on the host.
A target-only step hands them to the next one on the device, so it can do what SGLang's overlap loop
does for a server without speculation: launch a step, then commit the one before. All of it is on
one stream, so a KV slot that is freed in between is written again only after the step in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang_spec_ext.compat import sglang_v1

Commit = Callable[..., Any]


@dataclass
class _Launched:
    """A step whose tokens the scheduler has not seen.

    Attributes:
        commit: the scheduler's own ``process_batch_result_decode``.
        batch: its requests as they were.
        running: the scheduler's batch, which goes on changing.
        rows: the requests that `running`'s draft input has rows of.
    """

    commit: Commit
    scheduler: Any
    batch: Any
    result: Any
    running: Any
    rows: list[Any]


class InFlight:
    """At most one target-only step whose tokens are not committed yet.

    Args:
        committed: called with the number of tokens of each commit.
    """

    def __init__(self, committed: Callable[[int], None]) -> None:
        self._committed = committed
        self._launched: _Launched | None = None

    def __bool__(self) -> bool:
        return self._launched is not None

    def launched(
        self, commit: Commit, scheduler: Any, batch: Any, result: Any, *, stays: bool
    ) -> None:
        """Commit the step before this one; this one too, unless it stays in flight.

        Args:
            commit: called as ``commit(scheduler, batch, result)``.
            batch: the scheduler's running batch, just launched.
            stays: False if something on the host needs the tokens before the next step.
        """
        if stays:
            sglang_v1.copy_to_host(result, batch)
        if self._launched is not None:
            self._commit(self._launched)
        step = _Launched(commit, scheduler, batch.copy(), result, batch, list(batch.reqs))
        if not stays:
            self._commit(step)
        # requests that ended with the step before still have rows in this one
        step.rows = sglang_v1.drop_finished(batch.spec_info, step.rows)
        self._launched = step if stays and step.rows else None

    def land(self, preparing: Iterable[Any]) -> None:
        """Commit what is in flight, before something else runs.

        Args:
            preparing: requests of the prefill that comes. Those that are in flight as well were
                retracted in between, and compute the token that they lack anew.
        """
        step, self._launched = self._launched, None
        if step is None:
            return
        prefilled = {id(request) for request in preparing}
        again = [request for request in step.batch.reqs if id(request) in prefilled]
        for request in again:
            request.is_retracted = True  # SGLang's prefill has taken the mark off already
        self._commit(step)
        for request in again:
            request.is_retracted = False
        if any(request.finished() for request in step.rows):
            sglang_v1.drop_finished(step.running.spec_info, step.rows)

    def _commit(self, step: _Launched) -> None:
        self._committed(sum(not (r.finished() or r.is_retracted) for r in step.batch.reqs))
        with sglang_v1.plain(step.batch), sglang_v1.skipping_ended(step.scheduler):
            step.commit(step.scheduler, step.batch, step.result)
