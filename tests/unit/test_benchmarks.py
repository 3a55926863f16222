"""Figures in the documents are those of the raw results that they name."""

from __future__ import annotations

import importlib
import json
import re
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


def levels_at(concurrency: int, *names: str) -> dict[str, list[dict[str, Any]]]:
    """By variant, what each boot in these files measured there, where garbage was frozen."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in (run for name in names for run in raw(name)["runs"]):
        if run["server"].get("gc_frozen"):
            levels = {level["concurrency"]: level for level in run["levels"]}
            found.setdefault(run["variant"], []).append(levels[concurrency])
    return found


TOPK_1 = "h200-sglang-0.5.17-triton-topk1.json"


def mean_of(boots: list[dict[str, Any]], figure: str) -> float:
    return mean(boot[figure] for boot in boots)


def test_the_figures_beside_the_table_of_topk_1() -> None:
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    ends = []
    for concurrency in (32, 64, 128):
        boots = levels_at(concurrency, TOPK_1)
        ours, off = (mean_of(boots[v], "tok_s") for v in ("threshold=24", "off"))
        ends.append(f"{ours / off:.3f}")
    assert "come to {}, {} and {} of `off`".format(*ends) in text
    ours, on, off = (
        f"{mean_of(levels_at(64, TOPK_1)[variant], 'ttft_ms_p50'):.0f}"
        for variant in ("threshold=24", "on", "off")
    )
    assert f"{ours} ms in the median with N = 24, {on} with plain speculation, {off} with" in text


@pytest.mark.parametrize(
    ("name", "ours"), [(TOPK_1, "threshold=24"), (TOPK_1.replace("topk1", "topk4"), "threshold=20")]
)
def test_the_accept_lengths_of_the_worst_levels(name: str, ours: str) -> None:
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    came_to = [
        f"{mean_of(levels_at(4, name)[variant], 'accept_len'):.2f}" for variant in (ours, "on")
    ]
    assert "the simulated accept length came to {} against {} of `on`".format(*came_to) in text


def test_no_wave_in_two_parts_since_garbage_is_frozen() -> None:
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    measured = levels_at(64, *(path.name for path in SWEEPS))
    worst = max(level["ttft_ms_p99"] for levels in measured.values() for level in levels)
    assert f"TTFT at C = 64 is at most {worst:.0f} ms in the 99th percentile" in text


def test_the_figures_of_the_boots() -> None:
    name = "boot-h200-sglang-0.5.17-triton-topk1.json"
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"results/{name}" in text
    variants = ("threshold=24", "on", "off")
    boots = {(run["variant"], run["boot"]): run for run in raw(name)["runs"]}
    first, second = ([boots[variant, n]["boot_s"] for variant in variants] for n in (1, 2))
    assert (
        "in {:.1f} s, against {:.1f} s with plain speculation and {:.1f} s".format(*second) in text
    )
    assert "took {:.1f}, {:.1f} and {:.1f} s".format(*first) in text
    held = [boots[variant, 2]["capture_gb"] for variant in variants]
    assert "held {} GB of graphs, against {} and {}".format(*held) in text


def test_the_table_of_the_readme() -> None:
    shown = CliRunner().invoke(bench, ["report", f"{ROOT}/benchmarks/results/{TOPK_1}"]).output
    lines = shown.splitlines()
    columns = [[1, 2, 4, 8, 16, 32, 64, 128].index(c) for c in (1, 8, 16, 32, 64, 128)]
    readme = (ROOT / "README.md").read_text()
    for variant in ("off", "on", "adaptive", "threshold=24"):
        (line,) = [line for line in lines[:9] if re.match(rf"{variant}  +", line)]
        values = re.findall(r"(?:^|  )(\d+)(?: ±|  |$)", line.removeprefix(variant))
        assert f"| {' | '.join(values[column] for column in columns)} |" in readme
    (line,) = [line for line in lines if line.startswith("threshold=24 / max(on, off)")]
    ratios = [float(ratio) for ratio in re.findall(r"\d\.\d+", line)]
    assert f"| {' | '.join(f'{ratios[column]:.2f}' for column in columns)} |" in readme
