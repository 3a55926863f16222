"""`--config FILE.yaml` is read as SGLang reads it, and every mistake names the file and the key."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sglang_spec_ext.ops.preflight import config_file, installed
from sglang_spec_ext.ops.preflight.command import preflight
from sglang_spec_ext.ops.preflight.config_file import Entry
from sglang_spec_ext.ops.preflight.flags import recorded
from sglang_spec_ext.ops.wait.launch import url_of

START = "python -m sglang.launch_server"


@pytest.fixture(autouse=True)
def bare_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("SGL", "HF_", "CUDA")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "c.yaml") -> str:
    Path(name).write_text(text)
    return name


def check(line: str, *options: str, release: str = "0.5.23") -> Result:
    words = ["--sglang-version", release, "--no-host", *options, "--", *shlex.split(line)]
    return CliRunner().invoke(preflight, words)


def answer(line: str, release: str = "0.5.23") -> dict[str, Any]:
    result = check(line, "--json", release=release)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def said(line: str, release: str = "0.5.23") -> list[tuple[str, str, str, str | None]]:
    return [
        (f["id"], f["severity"], f["message"], f["fix"]) for f in answer(line, release)["findings"]
    ]


# --- what is read -------------------------------------------------------------------------------

GOOD = """\
# what the team always uses
model-path: m
tp: 2
trust-remote-code: true
enable-metrics: false
cuda-graph-bs-decode: [1, 2, 4]
speculative-algorithm: EAGLE3
speculative-draft-model-path: d
speculative-num-steps: 3
speculative-eagle-topk: 1
speculative-num-draft-tokens: 4
speculative-disable-batch-threshold: 3
speculative-draft-check: warn
max-running-requests: 4
json-model-override-args: {a: 1}
lora-target-modules: []
"""


def test_the_canonical_command_has_what_came_from_the_file() -> None:
    found = answer(f"{START} --config {write(GOOD)} --port 31000")
    assert found["exit_code"] == 0, found
    assert found["command"] == (
        "python -m sglang.launch_server --model-path m --tp-size 2 "
        "--trust-remote-code --cuda-graph-bs-decode 1 2 4 --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path d --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4 --speculative-disable-batch-threshold 3 "
        "--speculative-draft-check warn --max-running-requests 4 --json-model-override-args "
        "'{\"a\": 1}' --port 31000"
    )
    again = answer(found["command"])
    assert again["command"] == found["command"], "it says the same without the file"


def test_the_rules_see_what_came_from_the_file() -> None:
    text = GOOD.replace("threshold: 3", "threshold: 9") + "enable-mixed-chunk: true\n"
    assert [(f[0], f[1]) for f in said(f"{START} --config {write(text)}")] == [
        ("mixed-chunk", "warning"),
        ("threshold-unreachable", "warning"),
        ("graphs-too-small", "warning"),
        ("abbreviated", "note"),
    ]


def test_the_command_line_counts_before_the_file_wherever_it_stands() -> None:
    write("model-path: m\ntp-size: 2\nport: 5\n")
    for line in ("--port 6 --config c.yaml --tp-size 2", "--config c.yaml --tp-size 2 --port 6"):
        found = answer(f"{START} {line}")
        assert "--port 6" in found["command"] and "--port 5" not in found["command"]
        assert [(f["id"], f["severity"], f["message"]) for f in found["findings"]] == [
            ("config-overridden", "note", "--port 6 on the command line counts, not 5 of c.yaml")
        ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}\n"])
def test_an_empty_file_adds_nothing(text: str) -> None:
    found = answer(f"{START} --model-path m --config {write(text)}")
    assert (found["findings"], found["exit_code"]) == ([], 0)


def test_a_secret_in_the_file_is_not_printed() -> None:
    write("model-path: m\napi-key: geheim")
    result = check(f"{START} --config c.yaml")
    assert "geheim" not in result.output
    assert "--api-key ***" in result.output


# --- mistakes with the file ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--config none.yaml", "--config none.yaml: no such file"),
        ("--config c.json", "--config c.json: SGLang reads YAML only, and knows it by the name"),
        ("--config folder.yaml", "--config folder.yaml cannot be read: Is a directory"),
        ("--config", "--config needs a file"),
        ("--config --port 5", "--config needs a file"),
        ("--config c.yaml --config d.yaml", "--config is given 2 times; SGLang takes one file"),
        ("--config tab.yaml", "--config tab.yaml: while scanning for the next token found"),
        ("--config list.yaml", "--config list.yaml: Config file must contain a dictionary at root"),
        ("--config text.yaml", "--config text.yaml: Config file must contain a dictionary"),
        ("--config latin.yaml", "--config latin.yaml: 'utf-8' codec can't decode byte"),
    ],
)
def test_a_file_that_sglang_stops_at_is_one_message(line: str, says: str) -> None:
    for name, text in {"c.yaml": "model-path: m", "d.yaml": "", "c.json": "{}", "list.yaml": "- a",
                       "text.yaml": "just words", "tab.yaml": "a:\n\tb: 1"}.items():  # fmt: skip
        write(text, name)
    Path("folder.yaml").mkdir()
    Path("latin.yaml").write_bytes(b"model-path: \xe9")
    ((rule, severity, message, fix),) = said(f"{START} --speculative-num-steps 3 {line}")
    assert (rule, severity) == ("config-file", "error")
    assert message.startswith(says)
    assert fix
    result = check(f"{START} {line}")
    assert result.exit_code == 2
    assert line.split(" --port")[0] in result.output.splitlines()[-1]


@pytest.mark.parametrize("line", ["--config=c.yaml", "--conf c.yaml"])
def test_a_spelling_that_sglang_ignores_is_an_error(line: str) -> None:
    write("model-path: m")
    found = {f[0]: f for f in said(f"{START} --model-path m {line}")}
    _, severity, message, fix = found["config-ignored"]
    assert (severity, fix) == ("error", "write --config c.yaml")
    assert "SGLang does not read c.yaml" in message


def test_sglang_serve_looks_for_the_model_before_it_reads_the_file() -> None:
    write("model-path: m")
    ((rule, severity, message, fix),) = said("sglang serve --config c.yaml")
    assert (rule, severity) == ("serve-model", "error")
    assert "c.yaml" in message and fix is not None and "launch_server" in fix
    assert said("sglang serve m --config c.yaml") == []
    assert said("sglang serve --model=m --config c.yaml") == []
    assert said(f"{START} --config c.yaml") == []


# --- mistakes with a key ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule", "says", "fix"),
    [
        ("tp_size: 2", "foreign-flag", "--tp_size is no flag of SGLang 0.5.23",
         "write the key tp-size"),
        ("num-speculative-tokens: 3", "foreign-flag", "--num-speculative-tokens is no flag",
         "write the key speculative-num-draft-tokens"),
        ("portt: 5", "unknown-flag", "no SGLang release that is known has --portt",
         "did you mean the key port?"),
        ("port: many", "bad-value", "--port 'many' is not a whole number", "correct it"),
        ("port: [1, 2]", "stray-word", "'2' belongs to no flag; SGLang refuses it",
         "give one value, and no list"),
        ("server:\n  port: 5", "config-key", "it is a section, and no flag of SGLang has this name",
         "write all keys at the top level: the file is flat"),
        ("disable-cuda-graph: true", "config-key", "SGLang 0.5.23 stops at it (Unsupported config "
         "option 'disable-cuda-graph')",
         "take it out of the file and write --disable-cuda-graph on the command line"),
        ("lora-paths: [a]", "config-key", "SGLang 0.5.23 stops at it (Unsupported", "take it out"),
        ("dllm-fdfo: false", "config-key", "SGLang 0.5.23 stops at it (Unsupported", "take it"),
        ("5: x", "config-key", "SGLang 0.5.23 stops at it (AttributeError", "quote it, a key is"),
        ("speculative-algorithm:", "config-value", "it has no value: SGLang takes the text 'None'",
         "give it a value, or drop the key"),
        ("speculative-draft-check: off", "config-value", "YAML reads yes, no, on and off as true "
         "or false: SGLang gets 'false'", "quote the value, or correct it"),
        ("served-model-name: yes", "config-value", "YAML reads yes, no, on and off", "quote the"),
        ("config: other.yaml", "config-ignored", "SGLang does not read other.yaml", "drop it"),
        ("help: true", "help", "--help prints the help and starts nothing", "drop it"),
        ("speculative-disable-batch-threshold: many", "bad-value",
         "--speculative-disable-batch-threshold 'many' is not a whole number", "correct it"),
    ],
)  # fmt: skip
def test_a_key_that_goes_wrong_is_named_with_its_file(
    text: str, rule: str, says: str, fix: str
) -> None:
    found = said(f"{START} --model-path m --config {write(text)}")
    first = next(each for each in found if each[0] == rule)
    key = text.partition(":")[0]
    assert first[2].startswith(f"c.yaml, key {key}: {says}"), first
    assert first[3] is not None and first[3].startswith(fix), first
    assert found[0][1] == ("error" if rule != "config-value" or "check" in key else "warning")
    others = [each for each in found if "c.yaml" in each[2]]
    assert others == [first], "one message"


def test_a_key_may_be_fine_in_one_release_and_not_in_another() -> None:
    write("cuda-graph-max-bs-decode: 8")
    line = f"{START} --model-path m --config c.yaml"
    assert said(line, "0.5.23") == []
    # An old spelling of the flag has the same destination, and refuses both there.
    assert [f[0] for f in said(line, "0.5.17")] == ["config-key"]
    write("json-model-override-args: {a: b}")
    assert said(line, "0.5.14") == []
    ((rule, severity, message, fix),) = said(line, "0.5.9")
    assert (rule, severity) == ("config-value", "error")
    assert "makes Python's text of a nested value" in message
    assert fix is not None and fix.endswith("json-model-override-args: '{...}'")


def test_our_flags_in_the_file_are_judged_by_our_own_code() -> None:
    found = said(f"{START} --config {write(GOOD.replace('threshold: 3', 'threshold: -1'))}")
    assert [(f[0], f[1]) for f in found if f[1] != "note"] == [("threshold", "error")]


def test_two_spellings_of_one_flag_in_the_file_are_told() -> None:
    write("model-path: m\ntp-size: 2\ntensor-parallel-size: 4")
    found = said(f"{START} --config c.yaml")
    assert [(f[0], f[1]) for f in found] == [("given-twice", "warning")]
    assert "c.yaml, key tensor-parallel-size" in found[0][2]


# --- the installed release ----------------------------------------------------------------------

SERVER_ARGS = """
import argparse
class Odd(argparse.Action):
    pass
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--size", type=int)
        parser.add_argument("--fast", action="store_true")
        parser.add_argument("--odd", action=Odd)
        parser.add_argument("--config")
"""
MERGER = """
import yaml
class ConfigArgumentMerger:
    def __init__(self, parser):
        self.odd = [a.dest for a in parser._actions if type(a).__name__ == "Odd"]
    def _parse_yaml_config(self, path):
        print("noise on stdout")
        with open(path) as file:
            values = yaml.safe_load(file)
        if not isinstance(values, dict):
            raise ValueError("not as this release wants it")
        return values
    def _convert_config_to_args(self, config):
        ((key, value),) = config.items()
        if key in self.odd:
            raise ValueError(f"this release refuses {key}")
        return [f"--{key}"] if value is True else [f"--{key}", str(value)]
"""


@pytest.fixture(params=["", "utils"], ids=["before 0.5.19", "from 0.5.19 on"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    srt = tmp_path / "site" / "sglang" / "srt"
    (srt / "utils").mkdir(parents=True)
    (srt.parent / "__init__.py").write_text('__version__ = "0.5.17"')
    for folder in (srt, srt / "utils"):
        (folder / "__init__.py").write_text("")
    (srt / "server_args.py").write_text(SERVER_ARGS)
    (srt / request.param / "server_args_config_parser.py").write_text(MERGER)
    return {"PYTHONPATH": str(tmp_path / "site")}


def test_the_installed_release_reads_the_file_itself(environment: dict[str, str]) -> None:
    path = write("model-path: m\nsize: 8\nfast: true\nodd: 1\n")
    found = installed.ask(sys.executable, environment, path)
    assert found is not None and found.config is not None
    assert list(found.config.entries) == [
        Entry("model-path", ("--model-path", "m"), "", "str"),
        Entry("size", ("--size", "8"), "", "int"),
        Entry("fast", ("--fast",), "", "bool"),
        Entry("odd", (), "this release refuses odd", "int"),
    ]


def test_the_installed_release_may_refuse_the_file(environment: dict[str, str]) -> None:
    found = installed.ask(sys.executable, environment, write("- a"))
    assert found is not None and found.config is None
    assert str(found.refused) == "--config c.yaml: not as this release wants it"


def test_the_report_has_the_installed_releases_own_words(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "interpreter_of", lambda launcher: sys.executable)
    monkeypatch.setattr(installed, "version_of", lambda python: "0.5.17")
    line = f"PYTHONPATH={environment['PYTHONPATH']} {START} --config c.yaml"

    def told() -> tuple[list[str], str]:
        result = CliRunner().invoke(preflight, ["--no-host", "--json", "--", *line.split()])
        found = json.loads(result.stdout)
        return [f["message"] for f in found["findings"] if f["severity"] == "error"], found[
            "command"
        ].partition("launch_server ")[2]

    write("- a")
    assert told() == (["--config c.yaml: not as this release wants it"], "--config c.yaml")
    write("model: m\nodd: 1\nfast: true\n")
    assert told() == (
        ["c.yaml, key odd: SGLang 0.5.17 stops at it (this release refuses odd)"],
        "--model-path m --fast",
    )


def test_an_unknown_reader_is_replaced_by_the_recorded_way(environment: dict[str, str]) -> None:
    for path in Path("site").rglob("server_args_config_parser.py"):
        path.write_text("class Other: pass")
    found = installed.ask(sys.executable, environment, write("size: 8"))
    assert found is not None
    assert (found.config, found.refused) == (None, None)
    read = config_file.read("c.yaml", found.table)
    assert list(read.entries) == [Entry("size", ("--size", "8"), "", "int")]


# --- `wait --launch` ----------------------------------------------------------------------------


def test_the_url_of_a_launched_command_is_that_of_its_file() -> None:
    write("port: 31000\nhost: 0.0.0.0\n")
    assert url_of(["x", "--config", "c.yaml"]) == "http://0.0.0.0:31000"
    assert url_of(["x", "--port", "5", "--config", "c.yaml"]) == "http://0.0.0.0:5"
    assert url_of(["x", "--config", "none.yaml"]) == "http://127.0.0.1:30000"
    assert recorded("0.5.23").find("--port") is not None, "the key is the flag's name"
