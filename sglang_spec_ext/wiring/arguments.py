"""The argument seam: our flags on the command line, our keywords of ``Engine(**kwargs)``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang_spec_ext import args
from sglang_spec_ext.args import Settings, SettingsError
from sglang_spec_ext.compat import contracts, hooks
from sglang_spec_ext.compat.contracts import ARGUMENT_SEAM
from sglang_spec_ext.wiring import drafting, launcher
from sglang_spec_ext.wiring.asked import asked
from sglang_spec_ext.wiring.failure import NotBoundError, exit_on


def table() -> hooks.Table:
    functions: dict[str, hooks.Hook] = {
        "add_cli_args": add_cli_args,
        "from_cli_args": from_cli_args,
        "server_args_class": from_keywords,
    }
    return {point: functions[point.name] for point in ARGUMENT_SEAM}


def bind(only_in: str | None = None) -> list[str]:
    """Bind the seam, or no more of it than lies in this module; returns what is missing."""
    return contracts.check(points=ARGUMENT_SEAM) or hooks.bind(hooks.within(table(), only_in))


def add_cli_args(
    original: Callable[..., Any], parser: argparse.ArgumentParser, *rest: Any, **kwargs: Any
) -> Any:
    result = original(parser, *rest, **kwargs)
    args.add_flags(parser)
    return result


def from_cli_args(
    original: Callable[..., Any], cls: type, namespace: argparse.Namespace, *rest: Any
) -> Any:
    asked.on_command_line = True
    with exit_on(SettingsError, NotBoundError):
        settings = args.from_namespace(namespace)
        drafting.prepare(
            getattr(namespace, "speculative_algorithm", None),
            getattr(namespace, args.CHECK_KEYWORD, None),
        )
        return _construct(settings, lambda: original(cls, namespace, *rest))


def from_keywords(record_class: Callable[..., Any], **kwargs: Any) -> Any:
    """Take our keywords out of ``Engine(**kwargs)``, and pass the rest on."""
    settings = args.pop_keywords(kwargs)
    drafting.prepare(kwargs.get("speculative_algorithm"), kwargs.pop(args.CHECK_KEYWORD, None))
    return _construct(settings, lambda: record_class(**kwargs))


def _construct(settings: Settings | None, build: Callable[[], Any]) -> Any:
    """Build a ServerArgs record that carries the settings."""
    if settings is None:
        return build()
    launcher.bind()
    # releases up to 0.5.18 resolve the arguments inside the constructor
    with asked.constructing(settings):
        record = build()
    args.stamp(record, settings)
    return record
