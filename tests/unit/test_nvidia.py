"""nvidia-smi as a script: what it tells, and what it may say instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_spec_ext.ops import nvidia
from sglang_spec_ext.ops.bench import environment
from sglang_spec_ext.ops.wait import vitals


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The answer to any query lies in this file; without it the tool fails."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\necho $* > '{tmp_path}/asked'\nexec /bin/cat '{tmp_path}/answer'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "answer"


def test_rows_of_as_many_cells_as_were_asked_for(says: Path) -> None:
    says.write_text("0, 80000\nUnable to determine the device handle\n1, 70000\n")
    assert nvidia.ask("--query-gpu=index,memory.total") == [["0", "80000"], ["1", "70000"]]


def test_no_answer_is_no_gpu(says: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvidia.ask("--query-gpu=index") == []
    monkeypatch.setenv("PATH", "")
    assert nvidia.ask("--query-gpu=index") == []


def test_memory_of_a_servers_own_processes(says: Path) -> None:
    says.write_text("11, 100\n12, 20\n13, [N/A]\n")
    assert vitals._gpu_bytes({11, 12, 13}) == 120 << 20
    assert vitals._gpu_bytes({13, 14}) is None


def test_what_a_measurement_records(says: Path) -> None:
    says.write_text("NVIDIA H200, 580.1, 143771\n")
    assert environment.gpus() == [
        {"name": "NVIDIA H200", "driver": "580.1", "memory_mib": "143771"}
    ]
    says.write_text("512\n[N/A]\n")
    assert environment.gpu_memory_used_mib() == [512]


def test_only_the_gpus_that_the_server_sees_are_recorded(says: Path) -> None:
    says.write_text("NVIDIA H200, 580.1, 143771\n")
    environment.gpus("1")
    assert "--id=1" in says.with_name("asked").read_text()
    environment.gpus("")
    assert "--id" not in says.with_name("asked").read_text()
