"""`sglang-spec-ext preflight`: what is wrong with a command line, before anything loads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click
from rich.console import Console

from sglang_spec_ext.compat.releases import RELEASES, nearest
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity, exit_code
from sglang_spec_ext.ops.preflight import config_file, host, installed, rules, serve
from sglang_spec_ext.ops.preflight.command_line import Command as CommandLine
from sglang_spec_ext.ops.preflight.command_line import CommandError, split_command
from sglang_spec_ext.ops.preflight.config_file import ConfigError, ConfigFile
from sglang_spec_ext.ops.preflight.flags import FlagTable, recorded
from sglang_spec_ext.ops.preflight.reading import OURS, Reading, read_arguments
from sglang_spec_ext.ops.preflight.report import as_json, canonical, print_report
from sglang_spec_ext.ops.preflight.setup import Setup, local_config
from sglang_spec_ext.ops.usage import Command, WrongUsage


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
    GPU, else from a table recorded from the release's wheel. A file of --config is read the same
    way, and the command that is printed last has its values as flags.

    \b
    Exit codes:
        0  nothing, or notes only
        1  warnings
        2  errors
        3  wrong usage of this command
      130  interrupted
    """
    try:
        parts = split_command(command)
        judge = _judge(parts, sglang_version)
    except (CommandError, ValueError) as error:
        raise WrongUsage(str(error), context) from error
    table = judge.table
    line_up = serve.served(parts, nearest(table.release)[0])
    reading, read_all = _read(line_up.arguments, judge, serve.is_serve(parts))
    setup = Setup(
        release=nearest(table.release)[0],
        reading=reading,
        environment={**os.environ, **parts.environment},
        target=local_config(reading.get("model_path")),
        draft=local_config(reading.get("speculative_draft_model_path")),
    )
    findings = [*judge.notes, *reading.findings]
    # What stands in a file that cannot be read would be missed: that says nothing of the command.
    for rule in (*rules.RULES, *(() if no_host else host.RULES)) if read_all else ():
        findings += rule(setup)
    findings.sort(key=lambda finding: finding.severity)
    line = canonical(parts, reading, line_up.own)
    if as_json_:
        found = as_json(findings, reading, table.origin, line)
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print_report(Console(), findings, table.origin, line)
    context.exit(exit_code(findings))


@dataclass(frozen=True)
class _Judge:
    """What to judge by, and what is doubtful about it. ``answer`` is the installed release's."""

    table: FlagTable
    notes: tuple[Finding, ...] = ()
    answer: installed.Answer | None = None


def _judge(parts: CommandLine, version: str | None) -> _Judge:
    """The flags to judge by, and what is doubtful about them. ValueError: release too old."""
    if version is not None:
        release, known = nearest(version)
        notes = () if known else (_newer(version, release),)
        return _Judge(_with_ours(recorded(release)), notes)
    python = installed.interpreter_of(parts.launcher) or sys.executable
    found = installed.version_of(python)
    if found is None:
        release = RELEASES[-1]
        message = f"no SGLang is installed for {python}: judged as {release}"
        fix = "say which release will run it: --sglang-version"
        note = Finding("release", Severity.NOTE, message, fix)
        return _Judge(_with_ours(recorded(release)), (note,))
    release, known = nearest(found)
    click.echo(f"asking the parser of SGLang {found} (imports it, without a GPU) ...", err=True)
    answer = installed.ask(python, parts.environment, _readable_config(parts.arguments))
    if answer is None:
        message = f"the installed SGLang {found} could not be asked for its flags"
        fix = f"see what `{python} -m sglang.launch_server -h` says"
        warning = Finding("release", Severity.WARNING, message, fix)
        return _Judge(_with_ours(recorded(release)), (warning,))
    return _Judge(answer.table, () if known else (_newer(found, release),), answer)


def _readable_config(arguments: Sequence[str]) -> str | None:
    """The file that the installed release can be asked about; what is wrong is said later."""
    try:
        path, _ = config_file.take_out(arguments)
        if path is not None:
            config_file.check_path(path)
    except ConfigError:
        return None
    return path


def _read(arguments: Sequence[str], judge: _Judge, is_serve: bool) -> tuple[Reading, bool]:
    """The arguments, those of a --config file among them, and whether that could be read."""
    try:
        path, rest = config_file.take_out(arguments)
        file = None if path is None else _read_config(path, judge)
    except ConfigError as error:
        ours, rest = config_file.drop(arguments)
        reading = read_arguments(rest, judge.table)
        reading.findings = [each for each in reading.findings if each.id != "missing-flag"]
        reading.say("config-file", Severity.ERROR, str(error), error.fix)
        reading.canonical["config"] = ours
        return reading, False
    reading = read_arguments(rest, judge.table, file)
    if file is not None and is_serve and not serve.names_model(rest):
        reading.say(
            "serve-model",
            Severity.ERROR,
            f"`sglang serve` looks for {serve.MODEL_FLAGS[0]} on the command line before it reads "
            f"{file.path}",
            "write it there, or start with `python -m sglang.launch_server`",
        )
    return reading, True


def _read_config(path: str, judge: _Judge) -> ConfigFile:
    """As the installed release reads it, else as the recorded one. Raises ConfigError."""
    config_file.check_path(path)
    if judge.answer is not None:
        if judge.answer.refused is not None:
            raise judge.answer.refused
        if judge.answer.config is not None:
            return judge.answer.config
    return config_file.read(path, judge.table)


def _with_ours(table: FlagTable) -> FlagTable:
    """A recorded table knows SGLang only; the plugin adds its flags where it is installed."""
    return table.with_flags(OURS)


def _newer(version: str, release: str) -> Finding:
    message = f"SGLang {version} is newer than all that were read: judged by the rules of {release}"
    return Finding("release", Severity.NOTE, message)
