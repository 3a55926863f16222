"""The command line: lines, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from draft_checkpoints import eagle3, llama_target, speculators

from sglang_spec_ext.ops.check_draft import command
from sglang_spec_ext.ops.check_draft.command import check_draft


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(check_draft, [str(word) for word in words])


@pytest.fixture(autouse=True)
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a laptop: judge for all releases, whatever these tests are run with."""
    monkeypatch.setattr(command, "installed_version", lambda: None)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return llama_target().write(tmp_path / "target")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return eagle3().write(tmp_path / "draft")


def test_fine(target: Path, draft: Path) -> None:
    result = run("--target", target, "--draft", draft)
    assert result.exit_code == 0
    assert result.stdout == f"{draft}, for SGLang 0.5.9-0.5.23\nno errors, no warnings\n"


def test_warnings(target: Path, draft: Path) -> None:
    config = json.loads((draft / "config.json").read_text()) | {"rope_theta": 1e4}
    (draft / "config.json").write_text(json.dumps(config))
    result = run("--target", target, "--draft", draft)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "1 warning"


def test_errors_first_and_one_line_each(target: Path, tmp_path: Path) -> None:
    draft = speculators().write(tmp_path / "speculators")
    result = run("--target", target, "--draft", draft, "--algorithm", "EAGLE")
    lines = result.stdout.splitlines()
    assert result.exit_code == 2
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["error", "config-nested"],
        ["error", "arch-unknown"],
        ["error", "algorithm"],
        ["error", "layout-layers0"],
    ]
    assert " -> --convert renames it to midlayer.* [SGLang 0.5.9-0.5.11]" in lines[4]
    assert lines[-1] == "4 errors"


def test_json(target: Path, tmp_path: Path) -> None:
    draft = eagle3(layer="layers.0").write(tmp_path / "draft")
    result = run("--target", target, "--draft", draft, "--json")
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    assert (report["exit_code"], report["sglang"]) == (2, "all")
    (finding,) = report["findings"]
    assert finding["id"] == "layout-layers0"
    assert finding["severity"] == "error"
    assert finding["fix_by"] == "convert"
    assert finding["releases"] == ["0.5.9", "0.5.10.post1", "0.5.11"]


def test_server_arguments_after_two_dashes(target: Path, draft: Path) -> None:
    paths = ["--model-path", target, "--speculative-draft-model-path", draft]
    line = ["python", "-m", "sglang.launch_server", *paths, "--speculative-algorithm", "EAGLE"]
    result = run("--", *line)
    assert result.exit_code == 2
    assert "error   algorithm" in result.stdout
    # An option of our own wins.
    assert run("--algorithm", "EAGLE3", "--", *line).exit_code == 0


def test_hub_names_are_found_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--lab--draft"
    eagle3().write(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert run("--draft", "lab/draft").exit_code == 0
    assert "hf download" in run("--draft", "lab/other").stderr
    line = ["python", "-m", "sglang.launch_server", "--speculative-draft-model", "lab/draft"]
    assert run("--", *line).exit_code == 0
    (repository / "refs" / "main").write_text("gone")
    assert run("--draft", "lab/draft").exit_code == 3


def test_release_of_the_installed_sglang(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = eagle3(layer="layers.0").write(tmp_path / "foreign")
    monkeypatch.setattr(command, "installed_version", lambda: "0.5.23")
    assert run("--draft", foreign).exit_code == 0
    assert run("--draft", foreign, "--sglang-version", "all").exit_code == 2
    assert run("--draft", foreign, "--sglang-version", "0.5.10").exit_code == 2
    monkeypatch.setattr(command, "installed_version", lambda: "0.0.0.dev0")
    assert run("--draft", foreign).exit_code == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name the draft: --draft DIR"),
        (["--draft", "/nowhere/at/all"], "hf download"),
        (["--no-such-option"], "No such option"),
        (["--context-length", "0"], "context-length"),
        (["--draft", "x", "--sglang-version", "0.4.1"], "older than the oldest"),
        (["--", "--dtype"], "the server's command line: argument --dtype"),
    ],
)
def test_cannot_read_or_usage(words: list[str], says: str) -> None:
    result = run(*words)
    assert result.exit_code == 3
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_cannot_read_as_json(tmp_path: Path) -> None:
    result = run("--draft", tmp_path, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["exit_code"] == 3


def test_unreadable_file_is_one_line(draft: Path) -> None:
    (draft / "model.safetensors").unlink()
    (draft / "model.safetensors").mkdir()
    result = run("--draft", draft)
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 1


def test_convert(target: Path, tmp_path: Path) -> None:
    draft, out = speculators().write(tmp_path / "speculators"), tmp_path / "out"
    result = run("--target", target, "--draft", draft, "--convert", out)
    assert result.exit_code == 0, result.output
    assert f"{out}, for SGLang" in result.stdout
    assert "did     rename layers.0.* to midlayer.*" in result.stdout
    assert run("--target", target, "--draft", out).exit_code == 0
    assert run("--target", target, "--draft", draft, "--convert", out).exit_code == 3


def test_convert_refused(target: Path, tmp_path: Path) -> None:
    draft = speculators(norm_before_residual=True).write(tmp_path / "speculators")
    result = run("--target", target, "--draft", draft, "--convert", tmp_path / "out")
    assert result.exit_code == 2
    assert "norm-before-residual" in result.stdout
    assert "not converted, nothing written" in result.stderr
    assert not (tmp_path / "out").exists()
