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

import logging
import sys

from sglang_spec_ext import args
from sglang_spec_ext.args import SettingsError
from sglang_spec_ext.compat import hooks
from sglang_spec_ext.wiring import arguments, drafting, launcher, scheduler
from sglang_spec_ext.wiring.failure import NotBoundError, exit_on, explain

logger = logging.getLogger("sglang_spec_ext")

_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"


def register(only_in: str | None = None) -> None:
    """Called in each process by SGLang's plugin loader, or by `compat.bootstrap` where it has none.

    Args:
        only_in: bind no more than what lies in this module, because no other may be imported yet;
            the rest follows with a second call.
    """
    if not _spawned():
        _register_launcher(only_in)
    # detokenizer and tokenizer processes load plugins too, and have no use for ours
    elif _SCHEDULER_MODULE in sys.modules:
        _register_scheduler()


def verify_bound() -> list[str]:
    """Targets that should be bound in this process and are not."""
    return scheduler.unbound() if _spawned() else hooks.unbound(arguments.table())


def _spawned() -> bool:
    return args.from_worker_env() is not None or args.drafting_from_worker_env() is not None


def _register_scheduler() -> None:
    settings, with_draft = args.from_worker_env(), args.drafting_from_worker_env()
    if settings is not None:
        scheduler.bind(settings)
    if with_draft is not None:
        drafting.bind_in_scheduler(with_draft)


def _register_launcher(only_in: str | None) -> None:
    missing = arguments.bind(only_in)
    with exit_on(SettingsError):
        from_env = args.from_env()
        if args.wants_hooks(None):  # of a launcher whose arguments we do not see
            drafting.bind_in_launcher(only_in)
    if from_env is not None:
        with exit_on(NotBoundError):
            if missing:
                raise NotBoundError(explain(missing))
            launcher.bind(only_in)
    elif missing:
        # no flag was given yet, and none can be: argparse will say so if one is
        logger.warning("spec-ext: %s", explain(missing))
