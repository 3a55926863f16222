"""The launcher process: what a server's arguments are held to and what its processes are told."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from sglang_spec_ext import args, draft_check, observe, refusals
from sglang_spec_ext.args import SettingsError
from sglang_spec_ext.compat import contracts, diffs, hooks, workers
from sglang_spec_ext.runtime_state import relay_update
from sglang_spec_ext.wiring.asked import asked
from sglang_spec_ext.wiring.failure import NotBoundError, exit_on, explain, installed_release

logger = logging.getLogger("sglang_spec_ext")


def table() -> hooks.Table:
    functions: dict[str, hooks.Hook] = {
        "check_server_args": check_server_args,
        "launch_subprocesses": launch_subprocesses,
        "launch_subprocesses_function": launch_subprocesses_function,
        "admission_cap": admission_cap,
        "request_spec_metrics": observe.request_spec_metrics,
        "relay_update": relay_update,
    }
    return {point: functions[point.name] for point in contracts.in_use(workers.contract().launcher)}


def bind(only_in: str | None = None) -> None:
    """Bind what the threshold needs, or no more of it than lies in this module.

    Raises:
        NotBoundError: something of it is missing.
    """
    problems = workers.check() or diffs.missing() or hooks.bind(hooks.within(table(), only_in))
    if problems:
        raise NotBoundError(explain(problems))
    if only_in is not None:
        return
    release = installed_release()
    if release not in contracts.TESTED_RELEASES:
        logger.warning(
            "spec-ext: not tested with SGLang %s (tested: %s); all that it touches there is as "
            "expected, so it runs",
            release,
            ", ".join(contracts.TESTED_RELEASES),
        )


def check_server_args(original: Callable[..., Any], record: Any) -> Any:
    """Refuse what is not built, and a draft that cannot work, on the resolved arguments."""
    from sglang_spec_ext.compat import sglang_api

    result = original(record)
    settings = asked.settings_of(record)
    with exit_on(*([SettingsError] if asked.on_command_line else [])):
        resolved = sglang_api.resolved(record)
        if settings is not None:
            refusals.check(resolved, settings, workers.unfit(resolved))
        if args.drafts(getattr(resolved, "speculative_algorithm", None)):
            draft_check.run(resolved, asked.check_mode())
    return result


def admission_cap(original: Callable[..., Any], record: Any) -> Any:
    """Keep SGLang's own default of 48 running requests from hiding the threshold."""
    from sglang_spec_ext.compat import sglang_api

    if (
        asked.settings_of(record) is None
        or sglang_api.resolved(record).max_running_requests is not None
    ):
        return original(record)
    # with any value set SGLang leaves it alone; None then lets the memory pool decide, as without
    # speculation
    sglang_api.decide(record, max_running_requests=sys.maxsize)
    result = original(record)
    sglang_api.decide(record, max_running_requests=None)
    return result


def launch_subprocesses(
    original: Callable[..., Any], cls: type, server_args: Any, *rest: Any, **kwargs: Any
) -> Any:
    return _launch(lambda: original(cls, server_args, *rest, **kwargs), server_args)


def launch_subprocesses_function(
    original: Callable[..., Any], server_args: Any, *rest: Any, **kwargs: Any
) -> Any:
    return _launch(lambda: original(server_args, *rest, **kwargs), server_args)


def _launch(original: Callable[[], Any], server_args: Any) -> Any:
    """Launch the processes, and have each of them say that its hooks are bound."""
    settings = asked.settings_of(server_args)
    variables: dict[str, str] = settings.to_env() if settings is not None else {}
    algorithm = getattr(server_args, "speculative_algorithm", None)
    if args.drafts(algorithm):
        variables |= args.drafting_to_env(args.wants_hooks(algorithm), asked.check_mode())
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
        raise NotBoundError(explain(problems))


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
