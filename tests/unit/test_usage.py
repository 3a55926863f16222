"""Exit codes that are no findings, alike in all commands that judge."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from pytest_mock import MockerFixture

from sglang_spec_ext.ops.cli import main

# The command with what it needs, and what of it does the work.
JUDGING = {
    "check-draft": (["--draft", "d"], "check_draft.command.located"),
    "doctor": ([], "doctor.command.installed.look"),
    "preflight": (["--sglang-version", "0.5.23", "--", "--model-path", "m"],
                  "preflight.command.read_arguments"),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGING)
def test_wrong_usage_is_no_finding(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--no-such-option"])
    assert result.exit_code == 3
    assert "no such option" in result.output.lower()


@pytest.mark.parametrize("name", JUDGING)
def test_an_interrupt_is_no_finding(name: str, mocker: MockerFixture) -> None:
    words, work = JUDGING[name]
    mocker.patch(f"sglang_spec_ext.ops.{work}", side_effect=KeyboardInterrupt)
    assert CliRunner().invoke(main, [name, *words]).exit_code == 130
