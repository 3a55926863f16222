"""`sglang-spec-ext preflight`: what is wrong with a command line, before anything loads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console

from sglang_spec_ext.compat.releases import RELEASES, nearest
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity, exit_code
from sglang_spec_ext.ops.preflight import host, installed, rules
from sglang_spec_ext.ops.preflight.command_line import CommandError, split_command
from sglang_spec_ext.ops.preflight.flags import FlagTable, recorded
from sglang_spec_ext.ops.preflight.reading import OURS, read_arguments
from sglang_spec_ext.ops.preflight.report import as_json, canonical, print_report
from sglang_spec_ext.ops.preflight.setup import Setup, local_config

WRONG_USAGE = 3


class _WrongUsage(click.UsageError):
    """2 is taken by "errors were found"."""

    exit_code = WRONG_USAGE


class Command(click.Command):
    """Leaves 2 to the findings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise _WrongUsage(error.format_message(), ctx) from error


@click.command(
    cls=Command,
    short_help="Check an SGLang command line before anything loads.",
)
@click.option(
    "--sglang-version",
    metavar="VERSION",
    help=f"Judge for this release ({RELEASES[0]} to {RELEASES[-1]}) from the recorded table, "
    "instead of asking the installed SGLang.",
)
@click.option("--no-host", is_flag=True, help="Leave this box out: port, model files, GPUs, disk.")
@click.option("--json", "as_json_", is_flag=True, help="One JSON object instead of lines.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- SGLANG COMMAND LINE")
@click.pass_context
def preflight(
    context: click.Context,
    sglang_version: str | None,
    no_host: bool,
    as_json_: bool,
    command: tuple[str, ...],
) -> None:
    """Read the command as SGLang would and say what is wrong with it. Nothing is started.

    \b
      sglang-spec-ext preflight -- python -m sglang.launch_server --model-path ...
      sglang-spec-ext preflight --sglang-version 0.5.17 --no-host -- sglang serve ...

    The flags come from the parser of the SGLang that the command would start, which runs without a
    GPU, else from a table recorded from the release's wheel.

    \b
    Exit codes:
        0  nothing, or notes only
        1  warnings
        2  errors
        3  wrong usage of this command
    """
    try:
        parts = split_command(command)
        table, notes = _table(parts.launcher, parts.environment, sglang_version)
    except (CommandError, ValueError) as error:
        raise _WrongUsage(str(error), context) from error
    reading = read_arguments(parts.arguments, table)
    setup = Setup(
        release=nearest(table.release)[0],
        reading=reading,
        environment={**os.environ, **parts.environment},
        target=local_config(reading.get("model_path")),
        draft=local_config(reading.get("speculative_draft_model_path")),
    )
    findings = [*notes, *reading.findings]
    for rule in (*rules.RULES, *(() if no_host else host.RULES)):
        findings += rule(setup)
    findings.sort(key=lambda finding: finding.severity)
    line = canonical(parts, reading)
    if as_json_:
        found = as_json(findings, reading, table.origin, line)
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print_report(Console(), findings, table.origin, line)
    context.exit(exit_code(findings))


def _table(
    launcher: tuple[str, ...], environment: Mapping[str, str], version: str | None
) -> tuple[FlagTable, list[Any]]:
    """The flags to judge by, and what is doubtful about them. ValueError: release too old."""
    if version is not None:
        release, known = nearest(version)
        return _with_ours(recorded(release)), [] if known else [_newer(version, release)]
    python = installed.interpreter_of(launcher) or sys.executable
    found = installed.version_of(python)
    if found is None:
        release = RELEASES[-1]
        message = f"no SGLang is installed for {python}: judged as {release}"
        fix = "say which release will run it: --sglang-version"
        return _with_ours(recorded(release)), [Finding("release", Severity.NOTE, message, fix)]
    release, known = nearest(found)
    click.echo(f"asking the parser of SGLang {found} (imports it, without a GPU) ...", err=True)
    table = installed.read_table(python, environment)
    if table is None:
        message = f"the installed SGLang {found} could not be asked for its flags"
        fix = f"see what `{python} -m sglang.launch_server -h` says"
        return _with_ours(recorded(release)), [Finding("release", Severity.WARNING, message, fix)]
    return table, [] if known else [_newer(found, release)]


def _with_ours(table: FlagTable) -> FlagTable:
    """A recorded table knows SGLang only; the plugin adds its flags where it is installed."""
    return table.with_flags(OURS)


def _newer(version: str, release: str) -> Finding:
    message = f"SGLang {version} is newer than all that were read: judged by the rules of {release}"
    return Finding("release", Severity.NOTE, message)
