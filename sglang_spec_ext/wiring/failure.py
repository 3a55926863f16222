"""What was asked for and cannot be had ends the process, in one message that says what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sglang_spec_ext.args import THRESHOLD_FLAG
from sglang_spec_ext.compat import releases, workers


class NotBoundError(RuntimeError):
    """The flag was given and could not take effect."""


def explain(problems: list[str]) -> str:
    """One message for an operator: what was expected, what was found, what works, what to do."""
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return (
        f"{THRESHOLD_FLAG} cannot take effect with SGLang {installed_release()}; "
        f"what it needs is missing:{lines}\n"
        f"Works with SGLang {workers.supported()}. "
        "Check the installation with tools/verify_imports.py, that SGLANG_PLUGINS (if set) names "
        f"spec_ext, or start without {THRESHOLD_FLAG}."
    )


def installed_release() -> str:
    return releases.installed_version() or "without package metadata"


@contextlib.contextmanager
def exit_on(*errors: type[Exception]) -> Iterator[None]:
    """Turn these errors into SystemExit: SGLang catches every Exception around plugins."""
    try:
        yield
    except errors as error:
        raise SystemExit(f"sglang_spec_ext: error: {error}") from error
