"""The summary of profiler traces, on a trace of four small steps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SAMPLING = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>"
ATTENTION = "_fwd_grouped_kernel_stage1"
WRITE = "store_kvcache"


@pytest.fixture
def trace_summary(program: Callable[[str], ModuleType]) -> ModuleType:
    return program("trace_summary")


correlations = count(1)


def event(
    name: str, start: float, duration: float, graph: int | None = None, **more: Any
) -> dict[str, Any]:
    """A kernel, of the launch ``graph`` of a CUDA graph or of its own."""
    args = {"correlation": next(correlations) if graph is None else -graph}
    times = {"ts": start, "dur": duration}
    return {"cat": "kernel", "name": name, **times, "tid": 7, "args": args, **more}


def trace(writes_at: int | None = None) -> dict[str, Any]:
    """Four samplings 100 us apart, so three steps; the step ``writes_at`` has one kernel more."""
    events = [
        event("launch", 0, 1, cat="cuda_runtime"),  # on the CPU: no part of a step's GPU time
        {"name": "process_name", "ph": "M"},
    ]
    for place in range(4):
        start = 1000.0 + 100 * place
        later = 20 if place == writes_at else 0
        events += [
            event(SAMPLING, start, 10),
            event("Memcpy DtoH", start + 8, 6, cat="gpu_memcpy", tid=9),  # 4 us of it alone
            event(ATTENTION, start + 30 + later, 20, graph=place + 1),
            event(ATTENTION, start + 60 + later, 20, graph=place + 1),
        ]
        if later:
            events.append(event(WRITE, start + 20, 15))
    return {"deviceProperties": [{"name": "GPU"}], "traceEvents": events[::-1]}


def test_steps_and_what_they_are_busy_with(trace_summary: ModuleType) -> None:
    result = trace_summary.summary(trace(), "ArgMaxOps", ATTENTION)
    assert result["steps"] == 3
    assert result["step_us"] == [100.0] * 3
    assert result["busy_us"] == [10 + 4 + 20 + 20] * 3
    assert result["to_attention_us"] == [20.0] * 3
    assert result["launches"] == [4] * 3
    assert result["outside_graphs"] == [2] * 3
    assert result["kernels"][ATTENTION] == [2.0, 40.0]
    assert result["kernels"]["Memcpy DtoH"] == [1.0, 6.0]
    assert not result["more"]


def test_a_step_that_does_more_stays_out_of_the_ordinary_ones(trace_summary: ModuleType) -> None:
    result = trace_summary.summary(trace(writes_at=1), "ArgMaxOps", ATTENTION)
    assert result["launches"] == [4, 5, 4]
    assert result["outside_graphs"] == [2, 3, 2]
    assert result["to_attention_us"] == [20.0, 40.0, 20.0]
    assert WRITE not in result["kernels"]
    assert result["more"] == {WRITE: [1.0, 15.0]}


def test_a_kernel_that_outlasts_its_step_counts_up_to_its_end(trace_summary: ModuleType) -> None:
    long = trace()
    long["traceEvents"].append(event("gemm", 1090, 50))
    assert trace_summary.summary(long, "ArgMaxOps", ATTENTION)["busy_us"][0] == 54 + 10


def test_the_file_names_each_kernel_once(trace_summary: ModuleType, tmp_path: Path) -> None:
    plain, zipped, out = tmp_path / "a.json", tmp_path / "b.json.gz", tmp_path / "out.json"
    plain.write_text(json.dumps(trace()))
    zipped.write_bytes(gzip.compress(json.dumps(trace(writes_at=0)).encode()))
    assert trace_summary.main([f"a={plain}", f"b={zipped}", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["a"]["step_us"] == result["b"]["step_us"]
    assert result["kernels"][ATTENTION] == {"a": [2.0, 40.0], "b": [2.0, 40.0]}
    assert result["more"] == {WRITE: {"b": [1.0, 15.0]}}
    assert out.read_text().count(ATTENTION) == 1


@pytest.mark.parametrize(
    ("option", "says"),
    [(["--sampling", "softmax"], "--sampling"), (["--attention", "flash"], "--attention")],
)
def test_kernels_of_other_names_are_asked_for(
    trace_summary: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: list[str],
    says: str,
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace()))
    with pytest.raises(SystemExit):
        trace_summary.main([f"a={path}", *option])
    assert f"{path}: " in (error := capsys.readouterr().err)
    assert f"with {says}" in error


@pytest.mark.parametrize("argument", ["trace.json", "a=nowhere.json"])
def test_what_is_no_trace_is_refused(
    trace_summary: ModuleType, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    with pytest.raises(SystemExit):
        trace_summary.main([argument])
    assert argument.removeprefix("a=") in capsys.readouterr().err
