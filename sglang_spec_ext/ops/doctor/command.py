"""`sglang-spec-ext doctor`: one page on an installation and a running server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from rich.console import Console

from sglang_spec_ext.ops.check_draft.finding import Finding, Severity, exit_code
from sglang_spec_ext.ops.doctor import installed, problems, server
from sglang_spec_ext.ops.doctor.facts import Facts
from sglang_spec_ext.ops.doctor.report import as_json, print_page
from sglang_spec_ext.ops.usage import Command, WrongUsage


@click.command(
    cls=Command,
    short_help="One page on an installation and a running server, for bug reports.",
)
@click.option("--url", help="Also ask this running server, for example http://127.0.0.1:30000.")
@click.option(
    "--api-key", envvar="SGLANG_API_KEY", default="", help="For a server started with --api-key."
)
@click.option(
    "--patches",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of our diffs, to tell which of them are applied; by default the checkout's.",
)
@click.option("--json", "as_json_", is_flag=True, help="One JSON object instead of lines.")
@click.pass_context
def doctor(
    context: click.Context, url: str | None, api_key: str, patches: Path | None, as_json_: bool
) -> None:
    """Say what is installed and where it comes from, what a running server does, and which known
    problems this combination has. Changes nothing, imports nothing of SGLang, prints no secrets.

    \b
      sglang-spec-ext doctor
      sglang-spec-ext doctor --url http://127.0.0.1:30000 --json

    \b
    Exit codes:
        0  nothing, or notes only
        1  warnings
        2  errors, a server that does not answer among them
        3  wrong usage of this command
      130  interrupted
    """
    findings: list[Finding] = []
    running = None
    if url is not None:
        try:
            running = server.ask(url, api_key)
        except ValueError as error:
            raise WrongUsage(str(error), context) from error
        except server.NoAnswer as error:
            findings.append(Finding("no-answer", Severity.ERROR, str(error)))
    facts = Facts(installed.look(patches or installed.default_patches()), os.environ, running)
    findings += problems.find(facts)
    if as_json_:
        click.echo(json.dumps(as_json(facts, findings), indent=2, ensure_ascii=False))
    else:
        print_page(Console(highlight=False), facts, findings)
    context.exit(exit_code(findings))
