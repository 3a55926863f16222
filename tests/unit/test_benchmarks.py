"""Figures in the documents are those of the raw results that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
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
def log_cost(program: Callable[[str], ModuleType]) -> ModuleType:
    return program("log_cost")


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


def benchmarks_text() -> str:
    return " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())


TRACES = "trace-h200-sglang-0.5.17-fa3-topk4-above-n.json"


def of_both_times(traces: dict[str, Any], server: str, figure: str) -> list[list[float]]:
    """What each of a server's two traces has of all its steps."""
    return [traces[f"{server}-{time}"][figure] for time in ("first", "second")]


def test_the_steps_of_the_traces() -> None:
    """Of what one decode step takes above the threshold, next to one without speculation."""
    traces, text = raw(TRACES), benchmarks_text()
    assert f"results/{TRACES}" in text
    in_text, speeds, outside = [], [], set()
    for concurrency, form in (
        (32, "{:.3f} ms against {:.3f} of `off` at C = 32"),
        (64, "{:.3f} against {:.3f} at 64"),
        (128, "{:.3f} against {:.3f} at 128"),
    ):
        servers = f"threshold-{concurrency}", f"off-{concurrency}"
        ours, off = (mean(map(mean, of_both_times(traces, of, "step_us"))) for of in servers)
        in_text.append(form.format(ours / 1000, off / 1000))
        speeds.append(f"{off / ours:.3f}")
        for server in servers:
            outside |= set(map(median, of_both_times(traces, server, "outside_graphs")))
    steps = f"{', '.join(in_text[:2])} and {in_text[2]}"
    assert f"{steps}, which is {{}}, {{}} and {{}} of its speed".format(*speeds) in text
    (launched,) = outside
    assert f"launches {launched} kernels and copies outside of its CUDA graph, as many as" in text


def test_what_keeps_the_draft_warm_in_the_traces() -> None:
    traces, text = raw(TRACES), benchmarks_text()
    writes = []
    for launches, gaps in zip(
        of_both_times(traces, "threshold-128", "launches"),
        of_both_times(traces, "threshold-128", "to_attention_us"),
        strict=True,
    ):
        # the graph of a write has nine kernels
        at = [step for step, count in enumerate(launches) if count > median(launches) + 4]
        assert [later - step for step, later in pairwise(at)] == [8, 8]
        ordinary = median(gap for step, gap in enumerate(gaps) if step not in at)
        writes += [gaps[step] - ordinary for step in at]
    kernels = {
        name: mean(cost[f"threshold-128-{time}"][1] for time in ("first", "second"))
        for name, cost in traces["kernels"].items()
        if "threshold-128-second" in cost and "off-128-second" not in cost
    }
    states = sum(
        next(cost for name, cost in kernels.items() if name.startswith(start))
        for start in (
            "vectorized_elementwise_kernel<8, CUDAFunctor_add",
            "CatArrayBatchedCopy_vectorized",
        )
    )
    write, kept = mean(writes), kernels["keep_rows"]
    assert f"{states:.0f} µs for the three hidden states, {kept:.0f} µs to put" in text
    assert f"{write / 8:.0f} µs for the draft's K and V ({write:.0f} µs every eighth step)" in text
    step = mean(map(mean, of_both_times(traces, "threshold-128", "step_us")))
    assert f"{100 * (states + kept + write / 8) / step:.1f} % of a step; the aim was" in text


def test_how_long_the_gpu_rests_on_the_spec_v1_worker() -> None:
    name, text = "trace-h200-sglang-0.5.17-triton-topk1.json", benchmarks_text()
    traces = raw(name)
    rests = [
        f"{mean(traces[server]['step_us']) - mean(traces[server]['busy_us']):.0f} µs"
        for server in ("spec-v1-32", "off-32")
    ]
    assert "rests for {} of a step at C = 32, in that of `off` for {}".format(*rests) in text
    assert f"results/{name}" in text


def levels_at(concurrency: int, *names: str) -> dict[str, list[dict[str, Any]]]:
    """By variant, each time that these files measured it there, where garbage was frozen."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in (run for name in names for run in raw(name)["runs"]):
        if run["server"].get("gc_frozen"):
            levels = (level for level in run["levels"] if level["concurrency"] == concurrency)
            found.setdefault(run["variant"], []).extend(levels)
    return found


def typical(levels: list[dict[str, Any]], figure: str) -> float:
    """As the report has it."""
    return median(level[figure] for level in levels)


def verifies(levels: list[dict[str, Any]]) -> float:
    """Per second, and concurrency."""
    return median(level["server_tok_s"] / level["accept_len"] for level in levels)


def verify_ms(concurrency: int, name: str, variant: str) -> list[float]:
    """Each time that it was measured, how long one verify of all requests took."""
    levels = [
        level
        for run in raw(name)["runs"]
        for level in run["levels"]
        if run["variant"] == variant and level["concurrency"] == concurrency
    ]
    return [1000 * concurrency * of["accept_len"] / of["server_tok_s"] for of in levels]


@dataclass(frozen=True)
class Sweep:
    name: str
    threshold: int

    def ratios(self) -> dict[str, dict[int, float]]:
        """By aim, then by concurrency."""
        found: dict[str, dict[int, float]] = {"above N": {}, "all levels": {}, "up to N": {}}
        for concurrency in raw(self.name)["plan"]["concurrency"]:
            levels = levels_at(concurrency, self.name)
            ours, on, off = (levels[v] for v in (f"threshold={self.threshold}", "on", "off"))
            decode = [typical(variant, "server_tok_s") for variant in (ours, on, off)]
            found["all levels"][concurrency] = decode[0] / max(decode[1:])
            if concurrency > self.threshold:
                found["above N"][concurrency] = decode[0] / decode[2]
            else:
                found["up to N"][concurrency] = verifies(ours) / verifies(on)
        return found


TOPK_1 = "h200-sglang-0.5.17-triton-topk1.json"
TRITON_1 = Sweep(TOPK_1, 24)
TRITON_4 = Sweep("h200-sglang-0.5.17-triton-topk4.json", 20)
FA3_1 = Sweep("h200-sglang-0.5.17-fa3-topk1.json", 120)
FA3_4 = Sweep("h200-sglang-0.5.17-fa3-topk4.json", 20)
AIMED_AT = (TRITON_1, TRITON_4, FA3_1, FA3_4)


def test_the_table_of_the_aims() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for aim in ("above N", "all levels", "up to N"):
        cells = []
        for sweep in AIMED_AT:
            ratios = sweep.ratios()[aim]
            if not ratios:
                cells.append("none above N")
                continue
            worst = min(ratios, key=lambda concurrency: ratios[concurrency])
            cells.append(f"{ratios[worst]:.3f} at {worst}")
        (row,) = re.findall(rf"^\| {aim}: .*", text, re.MULTILINE)
        assert row.endswith(f"| {' | '.join(cells)} |")


def test_the_limit_that_the_readme_names() -> None:
    above = [ratio for sweep in AIMED_AT for ratio in sweep.ratios()["above N"].values()]
    readme = (ROOT / "README.md").read_text()
    assert f"Above N decoding reaches {min(above):.3f}-{max(above):.3f} of a server" in readme
    assert f"the levels come to {mean(above):.3f} in the mean." in benchmarks_text()


def test_the_levels_above_n_of_the_spec_v1_worker() -> None:
    above = []
    for topk, threshold in ((1, 24), (4, 20)):
        name = f"h200-sglang-0.5.12.post1-spec-v1-triton-topk{topk}.json"
        runs = {run["variant"]: run["levels"] for run in raw(name)["runs"]}
        for ours, off in zip(runs[f"threshold={threshold}"], runs["off"], strict=True):
            if ours["concurrency"] > threshold:
                above.append(ours["server_tok_s"] / off["server_tok_s"])
    figures = f"{min(above):.3f}-{max(above):.3f}"
    assert f"Above N it decodes at {figures} of a server without" in benchmarks_text()
    assert f"{figures} on spec-v1; our aim is" in (ROOT / "README.md").read_text()


def test_the_levels_above_n_that_were_measured_in_many_turns() -> None:
    name, ratios = "rounds-h200-sglang-0.5.17-triton-topk1.json", []
    for concurrency in (32, 64, 128):
        levels = levels_at(concurrency, name)
        ours, off = levels["threshold=24"], levels["off"]
        assert len(ours) == len(off) == 10
        ratios.append(f"{typical(ours, 'server_tok_s') / typical(off, 'server_tok_s'):.3f}")
    text = benchmarks_text()
    assert f"results/{name}" in text
    assert "{} at C = 32, {} at 64 and {} at 128".format(*ratios) in text


def test_how_far_steps_up_to_n_differ() -> None:
    text = benchmarks_text()
    triton = [r for sweep in (TRITON_1, TRITON_4) for r in sweep.ratios()["up to N"].values()]
    assert f"differ by up to {100 * max(abs(1 - r) for r in triton):.1f} % to either" in text
    ours, plain = verify_ms(8, FA3_4.name, "threshold=20"), verify_ms(2, FA3_4.name, "on")
    assert len(ours) == len(plain) == 4
    assert f"took {min(ours):.2f} to {max(ours):.2f} ms at C = 8 with N = 20" in text
    assert f"and {min(plain):.2f} to {max(plain):.2f} ms at C = 2 without it" in text
    topk_1 = FA3_1.ratios()["up to N"]
    assert (topk_1[1], topk_1[8]) == (max(topk_1.values()), min(topk_1.values()))
    more, fewer = 100 * (topk_1[1] - 1), 100 * (1 - topk_1[8])
    assert f"{more:.1f} % more verifies at C = 1 and {fewer:.1f} % fewer at 8" in text


@pytest.mark.parametrize(
    ("topk", "variant", "forms"),
    [
        (
            1,
            "threshold=120",
            {
                1: "{:.2f} ms against {:.2f} of plain speculation at C = 1",
                8: ", {:.2f} against {:.2f} at 8",
                16: " and {:.2f} against {:.2f} at 16, in the median",
            },
        ),
        (
            4,
            "threshold=20",
            {2: "{:.2f} ms against {:.2f} at C = 2", 8: " and {:.2f} against {:.2f} at 8"},
        ),
    ],
)
def test_the_verifies_that_were_measured_in_many_turns(
    topk: int, variant: str, forms: dict[int, str]
) -> None:
    name, text = f"rounds-h200-sglang-0.5.17-fa3-topk{topk}.json", benchmarks_text()
    assert f"results/{name}" in text
    times = {run["variant"]: len(run["levels"]) for run in raw(name)["runs"]}
    assert times == {variant: 12 * len(forms), "on": 12 * len(forms)}
    in_text = ""
    for concurrency, form in forms.items():
        both = [median(verify_ms(concurrency, name, each)) for each in (variant, "on")]
        in_text += form.format(*both)
    assert in_text in text


def test_that_both_launch_the_same_up_to_n() -> None:
    name, text = "trace-h200-sglang-0.5.17-fa3-topk4.json", benchmarks_text()
    assert f"results/{name}" in text
    traces = raw(name)
    (launches,) = {n for variant in ("on", "threshold") for n in traces[variant]["launches"]}
    assert f"the same {launches} kernels and copies" in text
    assert all(of["on"][0] == of["threshold"][0] for of in traces["kernels"].values())
    busy = [mean(traces[variant]["busy_us"]) / 1000 for variant in ("threshold", "on")]
    assert "is busy {:.2f} ms with N = 20 and {:.2f} without".format(*busy) in text


SWITCH_COSTS = "switch-cost-h200-sglang-0.5.17-triton-"


@pytest.mark.parametrize("load", ["topk1", "topk4", "topk1-c16"])
def test_the_tables_of_the_switches(load: str, switch_cost: ModuleType) -> None:
    name = f"{SWITCH_COSTS}{load}.json"
    result = raw(name)
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    _, named, after = text.partition(f"results/{name}")
    assert named and after.partition("\n\n")[2].startswith(switch_cost.table(result) + "\n\n")


def test_the_cost_of_a_switch_in_the_text(switch_cost: ModuleType) -> None:
    most = 0.0
    for path in (ROOT / "benchmarks" / "results").glob(f"{SWITCH_COSTS}*.json"):
        result = raw(path.name)
        *switches, none = (median(result["costs_ms"][kind]) for kind in switch_cost.KINDS)
        most = max(most, *(cost / result["step_ms"]["target-only"] for cost in switches))
        with_4 = result["load"]["concurrency"] == 4
        assert (max(switches) < none) == with_4, "less than the request without a switch"
    assert f"**One switch** costs at most {most:.2f} of a target-only step" in benchmarks_text()


def test_how_far_measurements_differ_above_n() -> None:
    spreads = []
    for sweep in AIMED_AT:
        for concurrency in sweep.ratios()["above N"]:
            levels = levels_at(concurrency, sweep.name)
            for variant in (f"threshold={sweep.threshold}", "off"):
                speeds = [level["server_tok_s"] for level in levels[variant]]
                spreads.append((max(speeds) - min(speeds)) / 2 / mean(speeds))
    assert f"half the spread of a level is up to {100 * max(spreads):.1f} % above N" in (
        benchmarks_text()
    )


@pytest.mark.parametrize("sweep", [TRITON_1, TRITON_4, FA3_4], ids=lambda sweep: sweep.name)
def test_the_figures_end_to_end(sweep: Sweep) -> None:
    ends = []
    for concurrency in (32, 64, 128):
        levels = levels_at(concurrency, sweep.name)
        ours, off = (typical(levels[v], "tok_s") for v in (f"threshold={sweep.threshold}", "off"))
        ends.append(f"{ours / off:.3f}")
    assert "levels above N come to {}, {} and {} of `off`".format(*ends) in benchmarks_text()


@pytest.mark.parametrize("sweep", [TRITON_1, TRITON_4], ids=lambda sweep: sweep.name)
def test_the_times_to_the_first_token(sweep: Sweep) -> None:
    ours, on, off = (
        f"{typical(levels_at(64, sweep.name)[variant], 'ttft_ms_p50'):.0f}"
        for variant in (f"threshold={sweep.threshold}", "on", "off")
    )
    assert (
        f"{ours} ms in the median with N = {sweep.threshold}, {on} with plain speculation, "
        f"{off} without" in benchmarks_text()
    )


def test_the_worst_levels_of_the_adaptive_mode() -> None:
    adaptive = {}
    for name in (TOPK_1, FA3_1.name):
        shown = CliRunner().invoke(bench, ["report", f"{ROOT}/benchmarks/results/{name}"]).output
        (adaptive[name],) = re.findall(r"adaptive: at worst (\d\.\d+) of the better", shown)
    text = benchmarks_text()
    assert f"comes to {adaptive[TOPK_1]} at its worst level with triton and topk 1" in text
    assert f"and to {adaptive[FA3_1.name]} with FA3; topk above 1 it refuses" in text


def test_no_wave_in_two_parts_since_garbage_is_frozen() -> None:
    text = benchmarks_text()
    measured = levels_at(64, *(path.name for path in SWEEPS))
    worst = max(level["ttft_ms_p99"] for levels in measured.values() for level in levels)
    assert f"TTFT at C = 64 is at most {worst:.0f} ms in the 99th percentile" in text


def test_the_figures_of_the_boots() -> None:
    name = "boot-h200-sglang-0.5.17-triton-topk1.json"
    text = benchmarks_text()
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
