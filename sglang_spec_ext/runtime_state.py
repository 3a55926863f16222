"""The plugin in one scheduler process as SGLang's control requests see and change it.

SGLang broadcasts a control request to all tensor-parallel ranks and handles it between two steps,
between the same two on each of them. All hold the same settings and judge it by the same code, so
they stay agreed without a word among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_spec_ext import __version__, args, observe
from sglang_spec_ext.args import KEYWORDS, Settings, SettingsError
from sglang_spec_ext.policy import Mode
from sglang_spec_ext.prometheus import Series

# Our key in each entry of "internal_states" of /server_info.
STATE_KEY = "sglang_spec_ext"
_REFUSAL = "refused"


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
        self._refused: str | None = None
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
            _REFUSAL: self._refused,
        }

    def update(self, original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        """Stand in for ``Scheduler.set_internal_state(request)``: all of a request, or nothing."""
        asked = dict(request.server_args)
        ours = {name: value for name, value in asked.items() if name in KEYWORDS.values()}
        if not ours:
            return original(scheduler, request)
        from sglang_spec_ext.compat import sglang_api

        policy = self._step.policy
        self._refused = None
        try:
            settings = args.changed(policy.settings, ours, self._step.largest_threshold)
        except SettingsError as error:
            self._refused = str(error)
            observe.log_on_first_rank(f"spec-ext: /set_internal_state changes nothing: {error}")
            return sglang_api.internal_state_answer(False)
        rest = {name: value for name, value in asked.items() if name not in ours}
        if rest:
            request.server_args = rest
            answer = original(scheduler, request)
            if not answer.updated:
                return answer
        observe.log_on_first_rank(
            f"spec-ext settings: {_text(policy.settings)} -> {_text(settings)} "
            "(by /set_internal_state)"
        )
        policy.settings = settings
        if self._series is not None:
            self._series.settings(settings)
        return sglang_api.internal_state_answer(True)


async def relay_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``TokenizerManager.set_internal_state``: say why a request of ours was refused.

    SGLang's own answer is true or false, and the reason stays in the scheduler's log.
    """
    updated = await original(manager, request)
    if all(updated) or not set(request.server_args) & set(KEYWORDS.values()):
        return updated
    states = await manager.get_internal_state()
    reasons = [state.get(STATE_KEY, {}).get(_REFUSAL) for state in states]
    if not any(reasons):
        return updated  # something else in the request was refused
    from fastapi import HTTPException

    raise HTTPException(400, next(reason for reason in reasons if reason))


def _text(settings: Settings) -> str:
    return f"N={settings.threshold}, M={settings.resume_threshold}, K={settings.min_steps}"


def _by_mode(counted: dict[Mode, int]) -> dict[str, int]:
    return {mode.value: number for mode, number in counted.items()}
