"""What a server with a draft gets without any flag of ours, in both of its processes.

Nobody asked for it, so what cannot be bound is a warning and the server runs as without the plugin.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_spec_ext import args, observe
from sglang_spec_ext.compat import contracts, hooks, workers
from sglang_spec_ext.compat.contracts import LOADING, LOADING_CALLED
from sglang_spec_ext.eagle3_hooks import embeddings, layers, loading, positions
from sglang_spec_ext.wiring import launcher
from sglang_spec_ext.wiring.asked import asked
from sglang_spec_ext.wiring.failure import installed_release

logger = logging.getLogger("sglang_spec_ext")

_LOADING: dict[str, hooks.Hook] = {
    "load_model": loading.load_model,
    "initialize_model": loading.initialize_model,
}
MENDING: dict[str, hooks.Hook] = {
    "device_graphs": layers.init_device_graphs,
    "target_embeds": embeddings.embed_mm_inputs,
    "draft_embeds": embeddings.draft_forward,
    "draft_positions": positions.draft_forward,
}
"""By touch point, for what the installed release's contract says is wrong with EAGLE-3 there."""

_watch = observe.AcceptWatch()
# bound once: a bind is recognised by the identity of the hook
_WATCHING: dict[str, hooks.Hook] = {
    "resolve_spec_tokens": _watch.resolve_spec_tokens,
    "process_decode": _watch.process_decode,
}


def prepare(algorithm: Any, check_mode: Any) -> None:
    """Bind, in the launcher, what a server with these arguments gets.

    Args:
        check_mode: what was given for ``args.CHECK_FLAG``, None for nothing.

    Raises:
        SettingsError: that cannot be used, or the variable that switches the hooks cannot.
    """
    asked.draft_check = check_mode
    mode = asked.check_mode()
    if args.drafts(algorithm) and (args.wants_hooks(algorithm) or mode != "off"):
        bind_in_launcher()


def bind_in_launcher(only_in: str | None = None) -> None:
    names = ("check_server_args", "launch_subprocesses", "launch_subprocesses_function")
    wanted = {p: hook for p, hook in launcher.table().items() if p.name in names}
    problems = contracts.check(points=(*wanted, *LOADING, *LOADING_CALLED))
    _warn_of(problems or hooks.bind(hooks.within(wanted, only_in)))


def table(drafting: args.Drafting) -> hooks.Table:
    """Of a scheduler process."""
    wanted: hooks.Table = {}
    points = contracts.in_use(workers.contract().scheduler)
    if drafting.hooks:
        wanted |= {p: _LOADING[p.name] for p in LOADING}
        wanted |= {p: MENDING[p.name] for p in points if p.name in MENDING}
    if drafting.check != "off":
        wanted |= {p: _WATCHING[p.name] for p in points if p.name in _WATCHING}
    return wanted


def bind_in_scheduler(drafting: args.Drafting) -> None:
    _warn_of(hooks.bind(table(drafting)))


def _warn_of(problems: list[str]) -> None:
    if problems:
        # SGLang itself stops at a target that lacks hooks
        logger.warning(
            "spec-ext: targets get no EAGLE-3 hooks and drafts are not watched with SGLang %s, "
            "where this is missing: %s",
            installed_release(),
            "; ".join(problems),
        )
