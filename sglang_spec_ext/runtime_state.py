"""The plugin in one scheduler process as SGLang's control requests see it."""

from __future__ import annotations

from typing import Any

from sglang_spec_ext import __version__, observe
from sglang_spec_ext.policy import Mode
from sglang_spec_ext.prometheus import Series

# Our key in each entry of "internal_states" of /server_info.
STATE_KEY = "sglang_spec_ext"


class RuntimeState:
    """State of one worker.

    Args:
        step: what runs its decode steps. Read of it: ``policy``, ``counts``,
            ``own_extend_reason`` (see `observe.warmth`), and ``largest_threshold``, the highest N
            that the captured graphs allow, None where nothing limits it.
        collector: SGLang's Prometheus collector, None where this process reports no metrics.
    """

    def __init__(self, step: Any, collector: Any | None = None) -> None:
        self._step = step
        self._series = None if collector is None else Series(collector)
        if self._series is not None:
            self._series.settings(step.policy.settings)
            step.counts.series = self._series

    def describe(self) -> dict[str, Any]:
        """Everything that an operator may want to know, as JSON takes it."""
        policy, counts = self._step.policy, self._step.counts
        settings = policy.settings
        return {
            "version": __version__,
            "mode": policy.mode.value,
            "threshold": settings.threshold,
            "resume_threshold": settings.resume_threshold,
            "min_steps": settings.min_steps,
            "largest_threshold": self._step.largest_threshold,
            "steps_in_mode": policy.steps_in_mode,
            "switches": _by_mode(counts.switches),
            "resumes": counts.resumes,
            "steps": _by_mode(counts.steps),
            "tokens": _by_mode(counts.tokens),
            "accept_length": counts.accept_length,
            "draft_tokens_warmed": counts.draft_tokens_warmed,
            "draft_kept_warm_by": observe.warmth(self._step.own_extend_reason),
        }


def _by_mode(counted: dict[Mode, int]) -> dict[str, int]:
    return {mode.value: number for mode, number in counted.items()}
