"""Entry point of the plugin: binds what the flags ask for, nothing else.

SGLang (or, where it has no plugin system, `compat.bootstrap`) calls `register` in the launcher and
in every process that it spawns, and *logs and goes on* when a plugin raises an Exception. So
whatever must not go unnoticed leaves here as SystemExit, or is raised from a hook, where nobody
catches it.

Launcher without the flag: only the argument seam is bound, without which there could be no flag.
Scheduler without the flag: nothing is. That is so for every server that does not speculate with a
draft model. For one that does, a few things more are bound, also without the flag, and none changes
what a request is answered: the check of the draft before weights load; the load of the target,
where it gets hooks that its class lacks and SGLang calls; what is wrong with the draft's input on
the spec-v1 worker; and a count of accepted drafts that looks at the first few hundred verifies and
warns if there are none.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from sglang_spec_ext import args, draft_check, observe, refusals
from sglang_spec_ext.args import Settings, SettingsError
from sglang_spec_ext.compat import contracts, hooks, releases, workers
from sglang_spec_ext.compat.contracts import ARGUMENT_SEAM, LOADING, LOADING_CALLED, TouchPoint
from sglang_spec_ext.eagle3_hooks import embeddings, layers, loading, positions
from sglang_spec_ext.policy import Mode
from sglang_spec_ext.runtime_state import STATE_KEY, RuntimeState, relay_update

logger = logging.getLogger("sglang_spec_ext")

_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"


class NotBoundError(RuntimeError):
    """The flag was given and could not take effect."""


def register(only_in: str | None = None) -> None:
    """Called in each process by SGLang's plugin loader, or by `compat.bootstrap` where it has none.

    Args:
        only_in: bind no more than what lies in this module, because no other may be imported yet;
            the rest follows with a second call.
    """
    settings = args.from_worker_env()
    drafting = args.drafting_from_worker_env()
    if settings is not None or drafting is not None:
        # detokenizer and tokenizer processes load plugins too, and have no use for ours
        if _SCHEDULER_MODULE in sys.modules:
            if settings is not None:
                _bind_scheduler(settings)
            if drafting is not None:
                _bind_drafting_scheduler(drafting)
        return
    missing = _bind_argument_seam(only_in)
    with _exit_on(SettingsError):
        from_env = args.from_env()
        if args.wants_hooks(None):  # of a launcher whose arguments we do not see
            _bind_drafting_launcher(only_in)
    if from_env is not None:
        with _exit_on(NotBoundError):
            if missing:
                raise NotBoundError(_explain(missing))
            _bind_launcher(only_in)
    elif missing:
        # no flag was given yet, and none can be: argparse will say so if one is
        logger.warning("spec-ext: %s", _explain(missing))


def verify_bound() -> list[str]:
    """Targets that should be bound in this process and are not."""
    settings, drafting = args.from_worker_env(), args.drafting_from_worker_env()
    if settings is None and drafting is None:
        return hooks.unbound(_argument_hooks())
    missing = hooks.unbound(_scheduler_hooks()) if settings is not None else []
    if drafting is not None:
        missing += hooks.unbound(_drafting_hooks(drafting))
    return missing


# ------------------------------------------------------------------------ argument seam


def _bind_argument_seam(only_in: str | None) -> list[str]:
    problems = contracts.check(points=ARGUMENT_SEAM)
    if problems:
        return problems
    return hooks.bind(_within(_argument_hooks(), only_in))


_Hooks = dict[TouchPoint, hooks.Hook]


def _within(asked: _Hooks, module: str | None) -> _Hooks:
    """The hooks on touch points in ``module``; all where it is None."""
    return {point: hook for point, hook in asked.items() if module in (None, point.module)}


def _argument_hooks() -> _Hooks:
    functions: dict[str, hooks.Hook] = {
        "add_cli_args": _add_cli_args,
        "from_cli_args": _from_cli_args,
        "server_args_class": _from_keywords,
    }
    return {point: functions[point.name] for point in ARGUMENT_SEAM}


def _add_cli_args(
    original: Callable[..., Any], parser: argparse.ArgumentParser, *rest: Any, **kwargs: Any
) -> Any:
    result = original(parser, *rest, **kwargs)
    args.add_flags(parser)
    return result


def _from_cli_args(
    original: Callable[..., Any], cls: type, namespace: argparse.Namespace, *rest: Any
) -> Any:
    global _started_from_command_line
    _started_from_command_line = True
    with _exit_on(SettingsError, NotBoundError):
        settings = args.from_namespace(namespace)
        _prepare_drafting(
            getattr(namespace, "speculative_algorithm", None),
            getattr(namespace, args.CHECK_KEYWORD, None),
        )
        return _construct(settings, lambda: original(cls, namespace, *rest))


def _from_keywords(record_class: Callable[..., Any], **kwargs: Any) -> Any:
    """Take our keywords out of ``Engine(**kwargs)``, and pass the rest on."""
    settings = args.pop_keywords(kwargs)
    _prepare_drafting(kwargs.get("speculative_algorithm"), kwargs.pop(args.CHECK_KEYWORD, None))
    return _construct(settings, lambda: record_class(**kwargs))


_under_construction: Settings | None = None
_started_from_command_line = False


def _construct(settings: Settings | None, build: Callable[[], Any]) -> Any:
    """Build a ServerArgs record that carries the settings."""
    global _under_construction
    if settings is None:
        return build()
    _bind_launcher()
    # releases up to 0.5.18 resolve the arguments inside the constructor
    _under_construction = settings
    try:
        record = build()
    finally:
        _under_construction = None
    args.stamp(record, settings)
    return record


def _settings_of(record: Any) -> Settings | None:
    return args.read_stamp(record) or _under_construction or args.from_env()


# ------------------------------------------------------------------------ launcher


def _launcher_hooks() -> dict[TouchPoint, hooks.Hook]:
    functions: dict[str, hooks.Hook] = {
        "check_server_args": _check_server_args,
        "launch_subprocesses": _launch_subprocesses,
        "launch_subprocesses_function": _launch_subprocesses_function,
        "admission_cap": _admission_cap,
        "request_spec_metrics": observe.request_spec_metrics,
        "relay_update": relay_update,
    }
    return {point: functions[point.name] for point in contracts.in_use(workers.contract().launcher)}


def _bind_launcher(only_in: str | None = None) -> None:
    problems = workers.check()
    if not problems:
        problems = hooks.bind(_within(_launcher_hooks(), only_in))
    if problems:
        raise NotBoundError(_explain(problems))
    if only_in is not None:
        return
    release = _installed_release()
    if release not in contracts.TESTED_RELEASES:
        logger.warning(
            "spec-ext: not tested with SGLang %s (tested: %s); all that it touches there is as "
            "expected, so it runs",
            release,
            ", ".join(contracts.TESTED_RELEASES),
        )


def _installed_release() -> str:
    return releases.installed_version() or "without package metadata"


def _check_server_args(original: Callable[..., Any], record: Any) -> Any:
    from sglang_spec_ext.compat import sglang_api

    result = original(record)
    settings = _settings_of(record)
    with _exit_on(*([SettingsError] if _started_from_command_line else [])):
        resolved = sglang_api.resolved(record)
        if settings is not None:
            refusals.check(resolved, settings)
        if args.drafts(getattr(resolved, "speculative_algorithm", None)):
            draft_check.run(resolved, _check_mode())
    return result


def _admission_cap(original: Callable[..., Any], record: Any) -> Any:
    """Keep SGLang's own default of 48 running requests from hiding the threshold."""
    from sglang_spec_ext.compat import sglang_api

    if _settings_of(record) is None or sglang_api.resolved(record).max_running_requests is not None:
        return original(record)
    # with any value set SGLang leaves it alone; None then lets the memory pool decide, as without
    # speculation
    sglang_api.decide(record, max_running_requests=sys.maxsize)
    result = original(record)
    sglang_api.decide(record, max_running_requests=None)
    return result


def _launch_subprocesses(
    original: Callable[..., Any], cls: type, server_args: Any, *rest: Any, **kwargs: Any
) -> Any:
    return _launch(lambda: original(cls, server_args, *rest, **kwargs), server_args)


def _launch_subprocesses_function(
    original: Callable[..., Any], server_args: Any, *rest: Any, **kwargs: Any
) -> Any:
    return _launch(lambda: original(server_args, *rest, **kwargs), server_args)


def _launch(original: Callable[[], Any], server_args: Any) -> Any:
    settings = _settings_of(server_args)
    variables: dict[str, str] = settings.to_env() if settings is not None else {}
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if args.drafts(algorithm):
        variables |= args.drafting_to_env(args.wants_hooks(algorithm), _check_mode())
    if variables:
        variables |= workers.to_env(server_args)
    with _environment(variables):
        launched = original()
    if settings is not None:
        _require_confirmation(launched)
    return launched


def _require_confirmation(launched: Any) -> None:
    """Every scheduler process must have said that its hooks are bound."""
    # a list in the first releases, a record that holds it since
    parts = [getattr(part, "scheduler_infos", part) for part in launched]
    infos: list[dict[str, Any]] = next((part for part in parts if isinstance(part, list)), [])
    problems = [
        f"scheduler process {rank} did not load the plugin"
        for rank, info in enumerate(infos)
        if not info.get(observe.CONFIRMATION)
    ]
    if not infos:
        problems = ["no scheduler process reported to the launcher"]
    if problems:
        raise NotBoundError(_explain(problems))


# ------------------------------------------------------------------------ with a draft, any server

_asked_check_mode: Any = None
_watch = observe.AcceptWatch()
# bound once: a bind is recognised by the identity of the hook
_watch_hooks: dict[str, hooks.Hook] = {
    "resolve_spec_tokens": _watch.resolve_spec_tokens,
    "process_decode": _watch.process_decode,
}


def _check_mode() -> str:
    return args.draft_check(_asked_check_mode)


def _prepare_drafting(algorithm: Any, check_mode: Any) -> None:
    """Bind, in the launcher, what a server with a draft gets without any flag."""
    global _asked_check_mode
    _asked_check_mode = check_mode
    mode = _check_mode()
    if args.drafts(algorithm) and (args.wants_hooks(algorithm) or mode != "off"):
        _bind_drafting_launcher()


def _bind_drafting_launcher(only_in: str | None = None) -> None:
    names = ("check_server_args", "launch_subprocesses", "launch_subprocesses_function")
    wanted = {p: hook for p, hook in _launcher_hooks().items() if p.name in names}
    problems = contracts.check(points=(*wanted, *LOADING, *LOADING_CALLED))
    _warn_of(problems or hooks.bind(_within(wanted, only_in)))


_LOADING_HOOKS: dict[str, hooks.Hook] = {
    "load_model": loading.load_model,
    "initialize_model": loading.initialize_model,
}
# What the contract of the installed release says is wrong there with an EAGLE-3 draft.
_MENDING_HOOKS: dict[str, hooks.Hook] = {
    "device_graphs": layers.init_device_graphs,
    "target_embeds": embeddings.embed_mm_inputs,
    "draft_embeds": embeddings.draft_forward,
    "draft_positions": positions.draft_forward,
}


def _drafting_hooks(drafting: args.Drafting) -> dict[TouchPoint, hooks.Hook]:
    wanted: dict[TouchPoint, hooks.Hook] = {}
    points = contracts.in_use(workers.contract().scheduler)
    if drafting.hooks:
        wanted |= {p: _LOADING_HOOKS[p.name] for p in LOADING}
        wanted |= {p: _MENDING_HOOKS[p.name] for p in points if p.name in _MENDING_HOOKS}
    if drafting.check != "off":
        wanted |= {p: _watch_hooks[p.name] for p in points if p.name in _watch_hooks}
    return wanted


def _bind_drafting_scheduler(drafting: args.Drafting) -> None:
    _warn_of(hooks.bind(_drafting_hooks(drafting)))


def _warn_of(problems: list[str]) -> None:
    if problems:
        # nobody asked for these by a flag: the server runs as without the plugin, and SGLang itself
        # stops at a target that lacks hooks
        logger.warning(
            "spec-ext: targets get no EAGLE-3 hooks and drafts are not watched with SGLang %s, "
            "where this is missing: %s",
            _installed_release(),
            "; ".join(problems),
        )


# ------------------------------------------------------------------------ scheduler process


_metrics = observe.SpecMetrics()
# bound once: a bind is recognised by the identity of the hook
_metrics_hooks: dict[str, hooks.Hook] = {
    "resolve_spec_tokens": _metrics.resolve_spec_tokens,
    "update_spec_metrics": _metrics.update_spec_metrics,
    "report_decode_stats": _metrics.report_decode_stats,
}


def _scheduler_hooks() -> dict[TouchPoint, hooks.Hook]:
    functions: dict[str, hooks.Hook] = {
        "forward_batch_generation": _forward_batch_generation,
        "forward_batch_generation_v1": _forward_batch_generation,
        "process_decode": _process_decode,
        "init_info": _init_info,
        "init_model_worker": _init_model_worker,
        "scheduler_process": _scheduler_process,
        "graph_sizes": _graph_sizes,
        "get_internal_state": _get_internal_state,
        "set_internal_state": _set_internal_state,
        **_MENDING_HOOKS,
        **_metrics_hooks,
    }
    return {
        point: functions[point.name] for point in contracts.in_use(workers.contract().scheduler)
    }


def _bind_scheduler(settings: Settings) -> None:
    global _worker_settings
    _worker_settings = settings
    with _exit_on(NotBoundError):
        missing = hooks.bind(_scheduler_hooks())
        if missing:
            raise NotBoundError(_explain(missing))


_worker_settings: Settings | None = None

_STEP = "_spec_ext_step"


def _forward_batch_generation(
    original: Callable[..., Any], worker: Any, batch: Any, *rest: Any, **kwargs: Any
) -> Any:
    return _step_of(worker).forward(original, batch, *rest, **kwargs)


def _step_of(worker: Any) -> Any:
    step = getattr(worker, _STEP, None)
    if step is None:
        assert _worker_settings is not None
        step = _step_class()(worker, _worker_settings)
        setattr(worker, _STEP, step)
    return step


def _step_class() -> Any:
    if workers.contract().worker == "spec-v1":
        from sglang_spec_ext.target_only.v1 import TargetOnlyStep as V1Step

        return V1Step
    from sglang_spec_ext.target_only.v2 import TargetOnlyStep as V2Step

    return V2Step


def _process_decode(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    from sglang_spec_ext.target_only import v1

    processed = v1.process_decode(original, scheduler, batch, result)
    if observe.is_target_only(result) and _metrics.counts is not None:
        size = result.next_token_ids.shape[0]
        _metrics.counts.committed(Mode.TARGET_ONLY, size, size)
    return processed


def _graph_sizes(original: Callable[..., Any], model_runner: Any, *rest: Any, **kwargs: Any) -> Any:
    from sglang_spec_ext.target_only import graphs

    assert _worker_settings is not None
    return graphs.prune_speculative_sizes(original, _worker_settings, model_runner, *rest, **kwargs)


def _init_info(original: Callable[..., Any], scheduler: Any) -> dict[str, Any]:
    info: dict[str, Any] = original(scheduler)
    _make_step(scheduler)
    info[observe.CONFIRMATION] = True
    return info


def _make_step(scheduler: Any) -> None:
    global _runtime_state
    from sglang_spec_ext.compat import sglang_api

    step = _step_of(scheduler.draft_worker)
    _metrics.counts = step.counts
    _runtime_state = RuntimeState(step, sglang_api.metrics_collector(scheduler))


_runtime_state: RuntimeState | None = None


def _get_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    answer = original(scheduler, request)
    assert _runtime_state is not None
    answer.internal_state[STATE_KEY] = _runtime_state.describe() | {"unbound": verify_bound()}
    return answer


def _set_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    assert _runtime_state is not None
    return _runtime_state.update(original, scheduler, request)


def _init_model_worker(original: Callable[..., Any], scheduler: Any) -> Any:
    result = original(scheduler)
    _make_step(scheduler)
    return result


def _scheduler_process(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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


# ------------------------------------------------------------------------ failing loudly


def _explain(problems: list[str]) -> str:
    """One message for an operator: what was expected, what was found, what works, what to do."""
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return (
        f"{args.THRESHOLD_FLAG} cannot take effect with SGLang {_installed_release()}; "
        f"what it needs is missing:{lines}\n"
        f"Works with SGLang {workers.supported()}. "
        "Check the installation with tools/verify_imports.py, that SGLANG_PLUGINS (if set) names "
        f"spec_ext, or start without {args.THRESHOLD_FLAG}."
    )


@contextlib.contextmanager
def _exit_on(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        _exit(error)


def _exit(error: Exception) -> NoReturn:
    # SGLang catches Exception around plugins; SystemExit is what stops the process
    raise SystemExit(f"sglang_spec_ext: error: {error}") from error


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
