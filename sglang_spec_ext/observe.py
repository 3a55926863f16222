"""What the operator sees: log lines, and SGLang's own figures kept true while target-only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_spec_ext.args import THRESHOLD_FLAG, Settings
from sglang_spec_ext.counts import Counts
from sglang_spec_ext.policy import Mode, Switch

logger = logging.getLogger("sglang_spec_ext")

# Key under which a scheduler process tells the launcher that its hooks are bound.
CONFIRMATION = "sglang_spec_ext"

_TARGET_ONLY_MARK = "spec_ext_target_only"

# A request's drafts that its verifies accepted, under the names that releases gave it.
_CORRECT_DRAFTS = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")

# The drafts accepted by one verify, of each request of its result, likewise.
_PER_REQUEST = (
    "num_correct_drafts_per_req_cpu",
    "num_accepted_drafts_per_req_cpu",
    "accept_length_per_req_cpu",
)

# A request's verifies by how many drafts they accepted, likewise.
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_acceptance_histogram")


def log_start(worker: Any, settings: Settings, own_extend_reason: str | None) -> None:
    """One line on rank 0: what is active, in numbers that the operator can compare.

    Every worker has one path so far: the target's plain decode, in which nothing is verified.
    """
    n, m, k = settings.threshold, settings.resume_threshold, settings.min_steps
    cap = worker.target_worker.model_runner.max_running_requests
    log_on_first_rank(
        f"spec-ext active: N={n}, M={m}, K={k}, max_running_requests={cap}, "
        f"algorithm={worker.speculative_algorithm.name}, topk={worker.topk}, "
        f"worker={type(worker).__name__}, path=plain decode, "
        f"draft kept warm by {warmth(own_extend_reason)}"
    )
    if cap is not None and n >= cap:
        log_on_first_rank(
            f"spec-ext warning: {THRESHOLD_FLAG} {n} can never be exceeded, since at most {cap} "
            "requests run at once (--max-running-requests). Lower the threshold or raise the cap."
        )


def warmth(own_extend_reason: str | None) -> str:
    """How the draft is kept warm, in words."""
    if own_extend_reason is None:
        return "KV-only writes"
    return f"SGLang's draft extend on every step ({own_extend_reason})"


def log_switch(switch: Switch, settings: Settings) -> None:
    """One line per change of mode. Called on every rank; only the first logs."""
    before = Mode.SPECULATING if switch.to is Mode.TARGET_ONLY else Mode.TARGET_ONLY
    log_on_first_rank(
        f"spec-ext switch: {before.value} -> {switch.to.value}, batch={switch.batch}, "
        f"N={settings.threshold}, M={settings.resume_threshold}, "
        f"steps since last switch={switch.steps_since_last}"
    )


def log_on_first_rank(message: str) -> None:
    """One INFO line, from tensor-parallel rank 0 only."""
    from sglang.srt.utils.common import log_info_on_rank0

    log_info_on_rank0(logger, message)


def mark_target_only(result: Any) -> None:
    """Mark a forward's result as made without speculation."""
    setattr(result, _TARGET_ONLY_MARK, True)


def is_target_only(result: Any) -> bool:
    return getattr(result, _TARGET_ONLY_MARK, False)


class SpecMetrics:
    """Keeps accept length a statement about verifies while steps without one go by.

    SGLang counts every decode step of a speculative server as a verify. The hooks here take the
    target-only ones out of the per-request counts, the server's counts and the decode report.

    counts: where the tokens of each step go, in either mode; set once the worker is there.
    """

    def __init__(self) -> None:
        self.counts: Counts | None = None
        self._skip_update = False

    def resolve_spec_tokens(
        self, original: Callable[..., Any], processor: Any, result: Any, batch: Any
    ) -> Any:
        """Around ``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``."""
        self._skip_update = is_target_only(result)
        if not self._skip_update:
            return original(processor, result, batch)
        before = [request.spec_verify_ct for request in batch.reqs]
        tokens = original(processor, result, batch)
        for request, verifies in zip(batch.reqs, before, strict=True):
            # some releases count requests that have ended meanwhile, some do not
            if request.spec_verify_ct > verifies:
                # undo it: one verify with no accepted draft
                request.spec_verify_ct -= 1
                _under_any(_HISTOGRAMS, request)[0] -= 1
        return tokens

    def update_spec_metrics(
        self,
        original: Callable[..., Any],
        reporter: Any,
        bs: int,
        num_correct_drafts: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Around ``SchedulerMetricsReporter.update_spec_metrics``, right after the above."""
        mode = Mode.TARGET_ONLY if self._skip_update else Mode.SPECULATING
        if self.counts is not None:
            self.counts.committed(mode, bs, bs + num_correct_drafts)
        if not self._skip_update:
            original(reporter, bs, num_correct_drafts, *args, **kwargs)

    def report_decode_stats(
        self, original: Callable[..., Any], reporter: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Around ``SchedulerMetricsReporter.report_decode_stats``, under whatever name."""
        if reporter.spec_num_forward_ct > 0:
            return original(reporter, *args, **kwargs)
        # no verify since the last report: report as a server without speculation does
        # in some releases the scheduler reports itself
        scheduler = getattr(reporter, "scheduler", reporter)
        algorithm = scheduler.spec_algorithm
        scheduler.spec_algorithm = type(algorithm).NONE
        try:
            return original(reporter, *args, **kwargs)
        finally:
            scheduler.spec_algorithm = algorithm


def request_spec_metrics(
    original: Callable[..., Any], manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """Around ``TokenizerManager._calculate_spec_decoding_metrics``.

    SGLang divides all tokens of the request by its verifies; with target-only steps among them that
    is no accept length. Accepted drafts per verify, plus the bonus token, is.
    """
    original(manager, meta_info, recv_obj, i)
    verifies = meta_info.get("spec_verify_ct")
    correct = next((meta_info[name] for name in _CORRECT_DRAFTS if name in meta_info), None)
    if verifies and correct is not None:
        meta_info["spec_accept_length"] = 1 + correct / verifies


def _under_any(names: tuple[str, ...], record: Any) -> Any:
    """What the record has under the first of these names under which it has anything."""
    values = (getattr(record, name, None) for name in names)
    return next((value for value in values if value is not None), None)


class AcceptWatch:
    """Says once and loudly that no drafted token is ever accepted.

    Watches the first `WINDOW` verifies of greedy requests: a sampled request may reject good drafts
    for long, a greedy one does not. Then it stops looking.
    """

    WINDOW = 256
    # what rounds to the 1.00 of SGLang's own log
    _STUCK_BELOW = 1.005

    def __init__(self) -> None:
        self._verifies = 0
        self._correct = 0

    def resolve_spec_tokens(
        self, original: Callable[..., Any], processor: Any, result: Any, batch: Any
    ) -> Any:
        """Around ``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``."""
        tokens = original(processor, result, batch)
        self._look_at(result, batch)
        return tokens

    def process_decode(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any
    ) -> Any:
        """The same on the spec-v1 worker, around the scheduler's processing of a decode step."""
        processed = original(scheduler, batch, result)
        self._look_at(result, batch)
        return processed

    def _look_at(self, result: Any, batch: Any) -> None:
        if self._verifies >= self.WINDOW or is_target_only(result):
            return
        correct = _under_any(_PER_REQUEST, result)
        if correct is not None:
            self._count(batch.reqs, correct)

    def _count(self, requests: Any, correct: list[int]) -> None:
        for request, drafts in zip(requests, correct, strict=True):
            # SGLang turns temperature 0 into the choice of the single likeliest token
            if request.sampling_params.top_k == 1:
                self._verifies += 1
                self._correct += drafts
        if self._verifies < self.WINDOW:
            return
        length = 1 + self._correct / self._verifies
        if length < self._STUCK_BELOW:
            logger.warning(
                "spec-ext warning: accept length is %.2f over %d verifies of greedy requests: the "
                "draft's tokens are never accepted, and the server is slower than without "
                "speculation. The draft was probably loaded in part, or belongs to another target. "
                "Run: sglang-spec-ext check-draft --target TARGET --draft DRAFT",
                length,
                self._verifies,
            )
