"""Figures in the documents are those of the raw results that they name."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_spec_ext.ops.bench.command import bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log_cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("log_cost")


def raw(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return result


def test_the_table_of_log_costs(log_cost: ModuleType) -> None:
    table = log_cost.table(raw("log-cost.json"))
    assert table.count("\n") == 1 + len(log_cost.KINDS)
    assert f"\n\n{table}\n\n" in (ROOT / "docs" / "operator-tools.md").read_text()


def test_the_cost_of_the_bootstrap() -> None:
    added = raw("bootstrap-cost.json")["added"]
    figures = (
        f"median {added['median']:.2f}, quartiles {added['lower_quartile']:.2f} and "
        f"{added['upper_quartile']:.2f} ms"
    )
    assert figures in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("name", ["log-cost.json", "bootstrap-cost.json"])
def test_a_raw_result_says_what_it_ran_on(name: str) -> None:
    machine = raw(name)["machine"]
    assert {"processor", "processors", "virtual", "load_average", "python"} <= machine.keys()


SWEEPS = sorted((ROOT / "benchmarks" / "results").glob("h200-*.json"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_tables_of_the_sweeps(path: Path) -> None:
    shown = CliRunner().invoke(bench, ["report", str(path), "--markdown"]).output
    table = shown[shown.index("| variant |") :].partition("\n\n")[0]
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert table in text
    assert f"results/{path.name}" in text


def test_the_figures_of_the_traces() -> None:
    """Of what one decode step spends above the threshold, next to one without speculation."""
    name = "trace-h200-sglang-0.5.17-triton-topk1.json"
    traces = raw(name)
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"results/{name}" in text

    ours, off = traces["threshold-128"], traces["off-128"]
    usual = median(ours["launches"])
    gaps = list(zip(ours["to_attention_us"], ours["launches"], strict=True))
    ordinary = median(gap for gap, launches in gaps if launches == usual)
    write = mean(gap for gap, launches in gaps if launches > usual) - ordinary
    assert f"{ordinary - median(off['to_attention_us']):.0f} µs more between sampling and" in text
    writes = [place for place, launches in enumerate(ours["launches"]) if launches > usual]
    assert [later - at for at, later in pairwise(writes)] == [8]
    assert f"{write / 8:.0f} µs for the draft's K and V ({write:.0f} µs every eighth step)" in text

    kernels = traces["kernels"]
    states = [
        next(cost for name, cost in kernels.items() if name.startswith(start))
        for start in ("vectorized_elementwise_kernel<8, CUDAFunctor_add", "CatArrayBatchedCopy")
    ]
    assert not any("off-128" in cost for cost in states)
    hidden = sum(cost["threshold-128"][1] for cost in states)
    assert f"{hidden:.0f} µs for the three hidden states" in text
    assert f"of a step of {mean(ours['step_us']) / 1000:.1f} ms" in text

    for figure in ("step_us", "busy_us"):
        with_n, without = (mean(traces[name][figure]) for name in ("threshold-32", "off-32"))
        assert f"{with_n / 1000:.3f} ms against {without / 1000:.3f}" in text


def first_tokens(name: str, variant: str, concurrency: int) -> list[tuple[int, int]]:
    """TTFT in ms of each boot: median and 99th percentile."""
    return [
        (round(level["ttft_ms_p50"]), round(level["ttft_ms_p99"]))
        for run in raw(name)["runs"]
        if run["variant"] == variant
        for level in run["levels"]
        if level["concurrency"] == concurrency
    ]


def test_the_figures_of_waves_in_two_parts() -> None:
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    ours = first_tokens("h200-sglang-0.5.17-triton-topk1.json", "threshold=24", 64)
    (first, first_late), (second, second_late) = ours
    assert (
        f"a median of {first} and {second} ms and a 99th percentile of {first_late} and "
        f"{second_late}."
    ) in text
    spec_v1 = "h200-sglang-0.5.12.post1-spec-v1-triton-topk1.json"
    (off,), (on,) = first_tokens(spec_v1, "off", 128), first_tokens(spec_v1, "on", 64)
    assert (
        f"TTFT is {off[0]} ms in the median and {off[1]} in the 99th percentile for `off` at "
        f"C = 128, and {on[0]} and {on[1]} for `on` at C = 64"
    ) in text
