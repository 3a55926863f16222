"""``sglang-spec-ext``: the operator's command line. Each subcommand lives in its own module."""

import click

from sglang_spec_ext import __version__
from sglang_spec_ext.ops.bench.command import bench
from sglang_spec_ext.ops.check_draft.command import check_draft
from sglang_spec_ext.ops.doctor.command import doctor
from sglang_spec_ext.ops.preflight.command import preflight
from sglang_spec_ext.ops.wait.command import wait


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sglang-spec-ext")
def main() -> None:
    """Tools around an SGLang server with speculative decoding."""


for command in (bench, check_draft, doctor, preflight, wait):
    main.add_command(command)
