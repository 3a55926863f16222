"""A command line is taken apart and read as argparse would, all mistakes at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_spec_ext.compat.releases import RELEASES
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity
from sglang_spec_ext.ops.preflight import installed
from sglang_spec_ext.ops.preflight.command_line import CommandError, split_command
from sglang_spec_ext.ops.preflight.flags import (
    recorded,
    releases_with_flag,
    releases_with_variable,
    variables,
)
from sglang_spec_ext.ops.preflight.reading import Reading, read_arguments

MODEL = ["--model-path", "m"]


def read(line: str, release: str = "0.5.17") -> Reading:
    return read_arguments([*MODEL, *line.split()], recorded(release))


def wrong(reading: Reading) -> list[Finding]:
    return [finding for finding in reading.findings if finding.severity is not Severity.NOTE]


def told(reading: Reading) -> list[tuple[str, str]]:
    return [(finding.id, finding.fix) for finding in wrong(reading)]


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "launcher", "environment"),
    [
        ("python -m sglang.launch_server --tp 2", "python -m sglang.launch_server", {}),
        ("A=1 B=x=y python3.12 -u -m sglang.launch_server --tp 2",
         "python3.12 -u -m sglang.launch_server", {"A": "1", "B": "x=y"}),
        ("env A=1 nohup sglang serve --tp 2", "sglang serve", {"A": "1"}),
        ("/venv/bin/sglang serve --tp 2", "/venv/bin/sglang serve", {}),
        ("docker run --gpus all -e A=1 --env B=2 -p 30000:30000 lmsys/sglang:v1 "
         "python3 -m sglang.launch_server --tp 2",
         "python3 -m sglang.launch_server", {"A": "1", "B": "2"}),
        ("--tp 2", "", {}),
    ],
)  # fmt: skip
def test_commands_are_split(line: str, launcher: str, environment: dict[str, str]) -> None:
    for words in (line.split(), [line]):
        command = split_command(words)
        assert " ".join(command.launcher) == launcher
        assert command.environment == environment
        assert command.arguments == ("--tp", "2")


@pytest.mark.parametrize("words", [[], ["ls", "-l"], ["python", "-m", "vllm.entrypoints"]])
def test_what_is_no_sglang_command_says_what_is_expected(words: list[str]) -> None:
    with pytest.raises(CommandError, match=r"expected `python -m sglang"):
        split_command(words)


# --- the recorded table -------------------------------------------------------------------------


def test_every_release_has_its_flags_and_variables() -> None:
    counts = [len(recorded(release).flags) for release in RELEASES]
    assert min(counts) > 300
    assert all(len(variables(release)) > 300 for release in RELEASES)


def test_facts_that_were_read_in_the_sources() -> None:
    assert releases_with_flag("--speculative-adaptive")[0] == "0.5.11"
    assert releases_with_flag("--cuda-graph-max-bs")[-1] == "0.5.19"
    assert releases_with_flag("--cuda-graph-max-bs-decode")[0] == "0.5.14"
    assert "0.5.9" in releases_with_variable("SGLANG_ENABLE_SPEC_V2")
    assert releases_with_variable("SGLANG_NO_SUCH_THING") == []
    algorithm = recorded("0.5.9").find("--speculative-algorithm")
    assert algorithm is not None and "DFLASH" not in algorithm.choices


# --- reading ------------------------------------------------------------------------------------


def test_a_clean_line_has_no_findings() -> None:
    reading = read(
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path d --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --port=31000 --tp 2 "
        "--trust-remote-code --mem-fraction-static 0.85 --lora-paths a=b c=d"
    )
    assert wrong(reading) == []
    assert reading.values["port"] == 31000
    assert reading.values["tp_size"] == 2
    assert reading.values["trust_remote_code"] is True
    assert reading.values["mem_fraction_static"] == 0.85
    assert reading.values["lora_paths"] == ["a=b", "c=d"]
    assert reading.get("host") == "127.0.0.1"


FOREIGN = [
    ("--num-speculative-tokens 3", "--speculative-num-draft-tokens"),
    ("--speculative-model d", "--speculative-draft-model-path"),
    ("--draft-model-path d", "--speculative-draft-model-path"),
    ("--num-speculative-steps 5", "--speculative-num-steps"),
    ("--eagle-topk 8", "--speculative-eagle-topk"),
    ("--num-draft-tokens 64", "--speculative-num-draft-tokens"),
    ("--enforce-eager", "--disable-cuda-graph"),
    ("--max-model-len 4096", "--context-length"),
    ("--gpu-memory-utilization 0.9", "--mem-fraction-static"),
    ("--mem_fraction_static 0.9", "--mem-fraction-static"),
]


@pytest.mark.parametrize(("line", "right"), FOREIGN)
def test_names_from_elsewhere_get_the_right_one(line: str, right: str) -> None:
    reading = read(line)
    assert told(reading) == [("foreign-flag", f"write {right}")]
    assert reading.findings[0].severity is Severity.ERROR
    flag = recorded("0.5.17").find(right)
    assert flag is not None and flag.dest in reading.values, "it is read as the right one"


def test_a_flag_that_has_moved_is_named_by_release() -> None:
    assert read("--cuda-graph-max-bs 8", "0.5.13.post1").findings == []
    assert told(read("--cuda-graph-max-bs 8", "0.5.20")) == [
        ("foreign-flag", "write --cuda-graph-max-bs-decode")
    ]
    (finding,) = read("--speculative-adaptive", "0.5.9").findings
    assert finding.id == "unknown-flag"
    assert "0.5.11-0.5.23 have" in finding.message


def test_abbreviations_are_understood_and_ambiguous_ones_refused() -> None:
    reading = read("--speculative-algo EAGLE3 --tp 2")
    assert told(reading) == []
    assert [finding.id for finding in reading.findings] == ["abbreviated"] * 2
    assert (reading.values["speculative_algorithm"], reading.values["tp_size"]) == ("EAGLE3", 2)
    (finding,) = wrong(read("--page 16", "0.5.9"))
    assert "but not in SGLang 0.5.23" in finding.message
    assert [finding.id for finding in read("--speculative-draft d").findings] == ["ambiguous"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("--port x", "bad-value"),
        ("--mem-fraction-static much", "bad-value"),
        ("--attention-backend flashinferr", "bad-value"),
        ("--port", "missing-value"),
        ("--port --tp 2", "missing-value"),
        ("--port 1 2", "stray-word"),
        ("--trust-remote-code=1", "flag-value"),
        ("--port 1 --port 2", "given-twice"),
        ("--no-such-flag-at-all 1 2", "unknown-flag"),
        ("--speculative-disable-batch-threshold 4", "unknown-flag"),
        ("--speculative-config {}", "foreign-flag"),
    ],
)
def test_mistakes_are_told_with_a_fix(line: str, rule: str) -> None:
    (finding,) = wrong(read(line))
    assert finding.id == rule
    assert finding.fix


def test_negative_numbers_are_values_and_equal_repeats_are_fine() -> None:
    reading = read("--chunked-prefill-size -1 --port 5 --port 5")
    assert reading.findings == []
    assert reading.values["chunked_prefill_size"] == -1


def test_all_mistakes_are_told_at_once() -> None:
    reading = read_arguments(
        ["--port", "x", "--enforce-eager", "--nope", "--tp", "2"], recorded("0.5.17")
    )
    assert {finding.id for finding in wrong(reading)} == {
        "bad-value", "foreign-flag", "unknown-flag", "missing-flag",
    }  # fmt: skip


# --- the installed parser -----------------------------------------------------------------------

FAKE = """
import argparse, os
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "a GPU could be touched"
        print("noise on stdout")
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--size", type=int, default=4, choices=[4, 8])
        parser.add_argument("--many", nargs="+")
        parser.add_argument("--fast", action="store_true")
        parser.add_argument("--both", action=argparse.BooleanOptionalAction)
"""
PLUGINS = """
def load_plugins():
    from sglang.srt import server_args
    old = server_args.ServerArgs.add_cli_args
    def add(parser):
        old(parser)
        parser.add_argument("--from-plugin", type=float)
    server_args.ServerArgs.add_cli_args = staticmethod(add)
"""


@pytest.fixture
def fake_sglang(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sglang" / "srt" / "plugins").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text('__version__ = "0.5.17"')
    (tmp_path / "sglang" / "srt" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(FAKE)
    (tmp_path / "sglang" / "srt" / "plugins" / "__init__.py").write_text(PLUGINS)
    return {"PYTHONPATH": str(tmp_path)}


def test_the_installed_parser_is_asked_without_a_gpu(fake_sglang: dict[str, str]) -> None:
    answer = installed.ask(sys.executable, fake_sglang)
    assert answer is not None and answer.config is None
    table = answer.table
    assert (table.release, len(table.flags)) == ("0.5.17", 6)
    reading = read_arguments(
        ["--model", "m", "--size", "8", "--many", "a", "b", "--no-both", "--from-plugin", "0.5"],
        table,
    )
    assert reading.findings == []
    assert reading.values == {
        "model_path": "m", "size": 8, "many": ["a", "b"], "both": False, "from_plugin": 0.5,
    }  # fmt: skip
    assert [f.id for f in read_arguments(["--size", "5"], table).findings] == [
        "bad-value", "missing-flag",
    ]  # fmt: skip


def test_an_sglang_that_cannot_be_imported_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text("raise ImportError('libcudart')")
    assert installed.ask(sys.executable, {"PYTHONPATH": str(tmp_path)}) is None
    assert installed.ask("/no/such/python", {}) is None


def test_the_interpreter_is_the_one_that_would_run(tmp_path: Path) -> None:
    script = tmp_path / "sglang"
    script.write_text(f"#!{sys.executable}\nimport sglang\n")
    script.chmod(0o755)
    assert installed.interpreter_of((str(script), "serve")) == sys.executable
    assert installed.interpreter_of((sys.executable, "-m", "sglang")) == sys.executable
    assert installed.interpreter_of(("/no/such/python",)) is None
    assert installed.interpreter_of(()) is None
