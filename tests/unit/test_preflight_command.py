"""`sglang-spec-ext preflight` as a whole: this box, the report, exit codes."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sglang_spec_ext.ops.preflight.command import preflight

START = "python -m sglang.launch_server --model-path"
CHAIN = (
    "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --max-running-requests 64"
)


@pytest.fixture(autouse=True)
def bare_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, no hub cache and no SGLang variables but those of the test."""
    for name in list(os.environ):
        if name.startswith(("SGL", "HF_", "CUDA")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin:/bin")


def check(line: str, *options: str) -> Result:
    words = ["--sglang-version", "0.5.23", *options, "--", *line.split()]
    return CliRunner().invoke(preflight, words)


def answer(line: str, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(check(line, "--json", *options).stdout)
    return found


def severities(line: str, *options: str) -> dict[str, str]:
    return {f["id"]: f["severity"] for f in answer(line, *options)["findings"]}


def model(folder: Path, shards: int = 1, size: int = 1024, **config: Any) -> Path:
    """A checkpoint of one bfloat16 tensor per shard, ``size`` elements each."""
    folder.mkdir()
    values = {"architectures": ["LlamaForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(values))
    weight_map = {}
    for number in range(shards):
        name = f"model-{number}.safetensors"
        weight_map[f"w{number}"] = name
        entry = {f"w{number}": {"dtype": "BF16", "shape": [size], "data_offsets": [0, 2 * size]}}
        header = json.dumps(entry).encode()
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(file.tell() + 2 * size)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fake_nvidia_smi(tmp_path: Path, free: int, total: int = 80000, count: int = 1) -> None:
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "nvidia-smi"
    gpus = "\n".join(f"echo {n}, {total}, {free}" for n in range(count))
    script.write_text(
        f'#!/bin/sh\ncase "$1" in *query-gpu*)\n{gpus};;\n'
        "*) echo 4711, /usr/bin/python3, 70000;; esac\n"
    )
    script.chmod(0o755)


# --- exit codes and report ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"{START} m --port 1", 0),
        (f"{START} m --port 1 --enable-mixed-chunk {CHAIN} --speculative-draft-model-path d", 1),
        (f"{START} m --enforce-eager", 2),
        ("ls -l", 3),
        ("", 3),
    ],
)
def test_exit_codes(line: str, code: int) -> None:
    result = check(line, "--no-host")
    assert result.exit_code == code, result.output


def test_wrong_options_and_releases_are_usage() -> None:
    assert check("--tp 2", "--no-such-option").exit_code == 3
    result = CliRunner().invoke(preflight, ["--sglang-version", "0.4.1", "--", "--tp", "2"])
    assert result.exit_code == 3
    assert "older than the oldest" in result.output


def test_an_interrupt_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_spec_ext.ops.preflight.command.read_arguments", interrupted)
    assert check(f"{START} m").exit_code == 130


def test_sglang_serve_takes_the_model_as_a_word_and_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(command: str, release: str) -> tuple[str, set[str]]:
        words = ["--sglang-version", release, "--no-host", "--json", "--", *command.split()]
        found = json.loads(CliRunner().invoke(preflight, words).stdout)
        return found["command"], {each["id"] for each in found["findings"]}

    assert line("sglang serve m --tp-size 2", "0.5.16") == (
        "sglang serve --model-path m --tp-size 2", set()
    )  # fmt: skip
    assert line("sglang serve m", "0.5.15")[1] == {"stray-word", "missing-flag"}
    assert line("sglang serve --model-type llm --model-path m", "0.5.23") == (
        "sglang serve --model-type llm --model-path m", set()
    )  # fmt: skip
    assert line("sglang serve --model-type=llm m", "0.5.9")[1] >= {"unknown-flag"}
    assert "stray-word" in line("python -m sglang.launch_server m", "0.5.23")[1]


def test_the_report_ends_with_the_canonical_command() -> None:
    line = (
        "HF_TOKEN=x python -m sglang.launch_server --model m --num-draft-tokens 4 --api-key abc "
        "--served-model-name my_model"
    )
    result = check(line, "--no-host")
    assert result.output.splitlines()[-1].endswith(
        "python -m sglang.launch_server --model-path m --speculative-num-draft-tokens 4 --api-key "
        "*** --served-model-name my_model"
    )
    assert "abc" not in result.output
    assert "HF_TOKEN=***" in result.output
    assert "judged by recorded from the wheel of SGLang 0.5.23" in result.output


def test_json_has_the_same() -> None:
    found = answer(f"{START} m --enforce-eager", "--no-host")
    assert (found["exit_code"], found["sglang"]) == (2, "0.5.23")
    assert found["findings"][0]["fix"] == "write --disable-cuda-graph"
    assert found["command"].endswith("--model-path m --disable-cuda-graph")


def test_without_any_sglang_the_newest_table_is_taken(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    result = CliRunner().invoke(preflight, ["--no-host", "--", *f"{START} m".split()])
    assert result.exit_code == 0, result.output
    assert "no SGLang is installed for" in result.output


# --- this box -----------------------------------------------------------------------------------


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert severities(f"{START} m --port {port}")["port-taken"] == "error"
    assert "port-taken" not in severities(f"{START} m --port {port}")


def test_models_that_are_not_here() -> None:
    assert severities(f"{START} /no/such/model")["no-model"] == "error"
    assert severities(f"{START} org/name") == {"model-download": "note"}
    assert severities(f"HF_HUB_OFFLINE=1 {START} org/name")["model-download"] == "error"


def test_a_cached_model_is_fine(tmp_path: Path) -> None:
    (tmp_path / "hub" / "hub" / "models--org--name" / "snapshots").mkdir(parents=True)
    assert severities(f"HF_HUB_OFFLINE=1 {START} org/name") == {}


def test_missing_and_half_shards_are_found(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", shards=3)
    assert severities(f"{START} {folder}") == {}
    (folder / "model-1.safetensors").unlink()
    found = answer(f"{START} {folder}")["findings"]
    assert "1 shards are missing, first: model-1.safetensors" in found[0]["message"]
    half = model(tmp_path / "half")
    os.truncate(half / "model-0.safetensors", 200)
    assert severities(f"{START} {half}")["model-files"] == "error"


def test_gpu_memory_is_weighed_against_the_weights(tmp_path: Path) -> None:
    fake_nvidia_smi(tmp_path, free=79000)
    folder = model(tmp_path / "m", size=60 << 30)  # 120 GB, sparse
    assert severities(f"{START} {folder}")["gpu-memory"] == "error"
    assert severities(f"{START} {folder} --tp 2")["too-few-gpus"] == "error"


def test_a_gpu_that_others_hold_is_told_with_its_holders(tmp_path: Path) -> None:
    fake_nvidia_smi(tmp_path, free=10000, count=2)
    folder = model(tmp_path / "m")
    (finding,) = answer(f"{START} {folder}")["findings"]
    assert finding["id"] == "gpu-busy"
    assert "pid 4711 python3 (70000 MB)" in finding["message"]
    assert severities(f"CUDA_VISIBLE_DEVICES=1 {START} {folder}") == {"gpu-busy": "warning"}
    assert severities(f"CUDA_VISIBLE_DEVICES=1 {START} {folder} --tp 2")["too-few-gpus"] == "error"


def test_a_free_gpu_is_no_finding(tmp_path: Path) -> None:
    fake_nvidia_smi(tmp_path, free=79000)
    assert severities(f"{START} {model(tmp_path / 'm')}") == {}


def test_check_draft_judges_a_local_pair(tmp_path: Path) -> None:
    target = model(tmp_path / "target", hidden_size=64, vocab_size=100)
    draft = model(tmp_path / "draft", hidden_size=32, vocab_size=100)
    line = f"{START} {target} {CHAIN} --speculative-draft-model-path {draft}"
    found = severities(line)
    assert any(
        name.startswith("draft:") and severity == "error" for name, severity in found.items()
    )
