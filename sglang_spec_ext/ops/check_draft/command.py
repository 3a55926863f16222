"""``sglang-spec-ext check-draft``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from sglang_spec_ext.compat.releases import RELEASES, installed_version, nearest
from sglang_spec_ext.ops.check_draft import report
from sglang_spec_ext.ops.check_draft.checkpoint import located
from sglang_spec_ext.ops.check_draft.convert import Conversion, ConversionRefused, convert
from sglang_spec_ext.ops.check_draft.finding import exit_code
from sglang_spec_ext.ops.check_draft.rules import check
from sglang_spec_ext.ops.check_draft.server import parse_command_line
from sglang_spec_ext.ops.check_draft.tensors import CheckpointError
from sglang_spec_ext.ops.usage import WRONG_USAGE, Command

REFUSED = 2
UNREADABLE = WRONG_USAGE


@click.command("check-draft", cls=Command)
@click.option(
    "--draft",
    type=click.Path(path_type=Path),
    help="Directory of the draft, or its Hub name if it is in the local cache.",
)
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    help="Directory of the target; only its config.json is read. Without it the checks that need "
    "it are left out.",
)
@click.option(
    "--convert",
    "out",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Write a repaired copy to OUT, which must not exist, and check that.",
)
@click.option("--algorithm", help="The server's --speculative-algorithm.")
@click.option("--attention-backend", help="The server's --attention-backend.")
@click.option(
    "--draft-attention-backend", help="The server's --speculative-draft-attention-backend."
)
@click.option(
    "--context-length", type=click.IntRange(min=1), help="The server's --context-length, in tokens."
)
@click.option("--dtype", help="The server's --dtype.")
@click.option("--quantization", help="The server's --quantization.")
@click.option(
    "--sglang-version",
    metavar="VERSION",
    help="Judge for this release, or `all`. Default: the installed one, else all "
    f"({RELEASES[0]} to {RELEASES[-1]}).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
@click.argument("server", nargs=-1, type=click.UNPROCESSED, metavar="[-- SGLANG COMMAND LINE]")
def check_draft(
    draft: Path | None,
    target: Path | None,
    out: Path | None,
    sglang_version: str | None,
    as_json: bool,
    server: tuple[str, ...],
    **flags: Any,
) -> None:
    """Does this EAGLE draft load into SGLang as its author meant it?

    Reads config.json and the headers of the weight files (and the small tables d2t and t2d), no
    weights; needs neither torch nor SGLang. One line per finding, errors first.

    The server's arguments can follow after `--`, as they are given to SGLang:

    \b
        sglang-spec-ext check-draft -- python -m sglang.launch_server \\
            --model-path TARGET --speculative-draft-model-path DRAFT \\
            --speculative-algorithm EAGLE3 --context-length 8192

    \b
    Exit codes:
        0  nothing, or notes only
        1  warnings
        2  errors; with --convert also: refused, OUT was not written
        3  a checkpoint cannot be read, OUT cannot be written, or wrong usage
      130  interrupted
    """
    conversion: Conversion | None = None
    try:
        args = parse_command_line(server, os.environ).updated(**flags)
        args = args.updated(release=_release(sglang_version))
        if draft is None and args.draft is None:
            raise CheckpointError("name the draft: --draft DIR")
        subject = located(draft or Path(str(args.draft)))
        target = target or (Path(args.target) if args.target else None)
        target = located(target) if target else None
        if out is None:
            findings = check(target, subject, args)
        else:
            conversion = convert(target, subject, out, args)
            findings, subject = conversion.findings, out
        refused = ""
    except ConversionRefused as refusal:
        findings, refused = refusal.findings, str(refusal)
    except (CheckpointError, ValueError, OSError) as error:
        if as_json:
            click.echo(json.dumps({"error": str(error), "exit_code": UNREADABLE}))
        click.echo(f"check-draft: {error}", err=True)
        raise click.exceptions.Exit(UNREADABLE) from error
    if as_json:
        click.echo(report.as_json(subject, target, args.release, findings))
    else:
        click.echo(f"{subject}, for SGLang {args.release or f'{RELEASES[0]}-{RELEASES[-1]}'}")
        for line in [*_done(conversion), *report.lines(findings)]:
            click.echo(line)
    if refused:
        click.echo(f"not converted, nothing written: {refused}", err=True)
        raise click.exceptions.Exit(REFUSED)
    raise click.exceptions.Exit(exit_code(findings))


def _release(given: str | None) -> str | None:
    """The version to judge for; None for all. Raises ValueError for one that cannot be judged."""
    if given == "all":
        return None
    version = given or installed_version()
    if version is None:
        return None
    try:
        nearest(version)
    except ValueError:
        if given is not None:
            raise
        return None  # some build beside us that has no usual version
    return version


def _done(conversion: Conversion | None) -> list[str]:
    if conversion is None:
        return []
    lines = [f"did     {edit}" for edit in conversion.edits] or ["did     nothing: a plain copy"]
    if conversion.left_out:
        lines.append(f"left    {', '.join(conversion.left_out)}")
    return lines
