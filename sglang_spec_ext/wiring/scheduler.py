"""A scheduler process with the threshold: its steps, its handshake, control requests to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sglang_spec_ext import args, observe
from sglang_spec_ext.args import Settings
from sglang_spec_ext.compat import contracts, hooks, workers
from sglang_spec_ext.runtime_state import STATE_KEY, RuntimeState
from sglang_spec_ext.wiring import drafting
from sglang_spec_ext.wiring.failure import NotBoundError, exit_on, explain

_metrics = observe.SpecMetrics()
# bound once: a bind is recognised by the identity of the hook
_metrics_hooks: dict[str, hooks.Hook] = {
    "resolve_spec_tokens": _metrics.resolve_spec_tokens,
    "update_spec_metrics": _metrics.update_spec_metrics,
    "report_decode_stats": _metrics.report_decode_stats,
}


def table() -> hooks.Table:
    functions: dict[str, hooks.Hook] = {
        "forward_batch_generation": forward_batch_generation,
        "forward_batch_generation_v1": forward_batch_generation,
        "process_decode": process_decode,
        "init_info": init_info,
        "init_model_worker": init_model_worker,
        "scheduler_process": scheduler_process,
        "graph_sizes": graph_sizes,
        "get_internal_state": get_internal_state,
        "set_internal_state": set_internal_state,
        **drafting.MENDING,
        **_metrics_hooks,
    }
    return {
        point: functions[point.name] for point in contracts.in_use(workers.contract().scheduler)
    }


def bind(settings: Settings) -> None:
    """Bind what the threshold needs; ends the process where something of it is missing."""
    global _settings
    _settings = settings
    with exit_on(NotBoundError):
        missing = hooks.bind(table())
        if missing:
            raise NotBoundError(explain(missing))


def unbound() -> list[str]:
    """Targets that should be bound in this process, for the threshold or a draft, and are not."""
    missing = hooks.unbound(table()) if args.from_worker_env() is not None else []
    with_draft = args.drafting_from_worker_env()
    if with_draft is not None:
        missing += hooks.unbound(drafting.table(with_draft))
    return missing


# ------------------------------------------------------------------------ steps


_settings: Settings | None = None

_STEP = "_spec_ext_step"


def forward_batch_generation(
    original: Callable[..., Any], worker: Any, batch: Any, *rest: Any, **kwargs: Any
) -> Any:
    return _step_of(worker).forward(original, batch, *rest, **kwargs)


def _step_of(worker: Any) -> Any:
    step = getattr(worker, _STEP, None)
    if step is None:
        assert _settings is not None
        step = _step_class()(worker, _settings)
        setattr(worker, _STEP, step)
    return step


def _step_class() -> Any:
    if workers.contract().worker == "spec-v1":
        from sglang_spec_ext.target_only.v1 import TargetOnlyStep as V1Step

        return V1Step
    from sglang_spec_ext.target_only.v2 import TargetOnlyStep as V2Step

    return V2Step


def process_decode(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    return _step_of(scheduler.draft_worker).process_decode(original, scheduler, batch, result)


def graph_sizes(original: Callable[..., Any], model_runner: Any, *rest: Any, **kwargs: Any) -> Any:
    from sglang_spec_ext.target_only import graphs

    assert _settings is not None
    return graphs.prune_sizes(original, _settings, model_runner, *rest, **kwargs)


# ------------------------------------------------------------------------ handshake


def init_info(original: Callable[..., Any], scheduler: Any) -> dict[str, Any]:
    info: dict[str, Any] = original(scheduler)
    _make_step(scheduler)
    info[observe.CONFIRMATION] = True
    return info


def init_model_worker(original: Callable[..., Any], scheduler: Any) -> Any:
    result = original(scheduler)
    _make_step(scheduler)
    return result


def _make_step(scheduler: Any) -> None:
    global _runtime_state
    from sglang_spec_ext.compat import sglang_api

    step = _step_of(scheduler.draft_worker)
    step.attach(scheduler)
    _metrics.counts = step.counts
    _runtime_state = RuntimeState(step, sglang_api.metrics_collector(scheduler))


def scheduler_process(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Confirm in the handshake, where the process has no function of its own that makes it.

    It is sent after the scheduler was built, and that fails where the step cannot be made.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.arguments["pipe_writer"] = _ConfirmingPipe(call.arguments["pipe_writer"])
    return original(*call.args, **call.kwargs)


class _ConfirmingPipe:
    """The pipe to the launcher; adds the confirmation to the scheduler's word that it is ready."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def send(self, info: dict[str, Any]) -> None:
        self._pipe.send({**info, observe.CONFIRMATION: True})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


# ------------------------------------------------------------------------ control requests


_runtime_state: RuntimeState | None = None


def get_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    answer = original(scheduler, request)
    assert _runtime_state is not None
    answer.internal_state[STATE_KEY] = _runtime_state.describe() | {"unbound": unbound()}
    return answer


def set_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    assert _runtime_state is not None
    return _runtime_state.update(original, scheduler, request)
