"""Exit codes of the commands that judge something: 0, 1 and 2 say what was found.

So wrong usage, for which click has 2, is another code, and so is Ctrl-C, for which click has 1.
"""

from __future__ import annotations

from typing import Any

import click

WRONG_USAGE = 3
INTERRUPTED = 130


class WrongUsage(click.UsageError):
    exit_code = WRONG_USAGE


class Command(click.Command):
    """Leaves 1 and 2 to the findings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise WrongUsage(error.format_message(), ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
