"""Tables, remarks and the chart, from results alone."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from bench_levels import LOAD, curve, level, results, run

from sglang_spec_ext.ops.bench.chart import ChartError, draw_chart, subtitle
from sglang_spec_ext.ops.bench.crossover import recommend
from sglang_spec_ext.ops.bench.render import print_report
from sglang_spec_ext.ops.bench.report import (
    boot_table,
    detail_table,
    ratios,
    remarks,
    throughput_table,
    worst_ratio,
)
from sglang_spec_ext.ops.bench.results import Load, Results

OFF = {1: 200.0, 16: 3000.0}
ON = {1: 300.0, 16: 2000.0}


def sweep(**threshold_facts: Any) -> Results:
    return results(
        curve("threshold=4", {1: 294, 16: 2850}, **threshold_facts),
        curve("on", ON),
        curve("off", OFF),
        curve("threshold=4", {1: 306, 16: 2880}, boot=2, **threshold_facts),
    )


def test_throughput_with_spread_and_ratio() -> None:
    table = throughput_table(sweep())
    assert table.columns == ["variant", "1", "16"]
    assert table.rows == [
        ["off", "200", "3000"],
        ["on", "300", "2000"],
        ["threshold=4", "300 ±2.0%", "2865 ±0.5%"],
        ["threshold=4 / max(on, off)", "1.000", "0.955"],
    ]
    assert table.caption == "server's decode tok/s; ± is half the spread of 2 boots"


def test_levels_with_remarks_are_marked() -> None:
    found = sweep(graph_share=0.5)
    assert throughput_table(found).rows[2][1] == "300* ±2.0%"
    assert "* see the remarks" in throughput_table(found).caption
    assert any("threshold=4, boot 2, C=16: ran only 50%" in text for text in remarks(found))


def test_ratios_name_the_worst_level_and_the_bar() -> None:
    found = sweep()
    assert [(r.concurrency, r.ratio) for r in ratios(found, "server's decode tok/s")] == [
        (1, 1.0),
        (16, 0.955),
    ]
    assert worst_ratio(found) == [
        "threshold=4: at worst 0.955 of the better of on and off (C=16); misses the bar of 0.97"
    ]


@pytest.mark.parametrize("second, verdict", [(2980, "reaches"), (2940, "misses")])
def test_measurements_on_either_side_of_the_bar_are_told(second: float, verdict: str) -> None:
    found = results(
        curve("on", {16: 2000}),
        curve("off", {16: 3000}),
        curve("threshold=4", {16: 2850}),
        curve("threshold=4", {16: second}, boot=2),
    )
    (sentence,) = worst_ratio(found)
    assert (
        f"(C=16); {verdict} the bar of 0.97, but what was measured ranges from 0.950 to" in sentence
    )


def test_no_ratio_without_both_references() -> None:
    found = results(curve("off", OFF), curve("threshold=4", ON))
    assert ratios(found, "server's decode tok/s") == []
    assert worst_ratio(found) == []


def test_details() -> None:
    queued = {"graph_backend": "cpu", "running_max": 8, "queued": 8}
    blind = dict.fromkeys(
        ("server_tok_s", "graph_backend", "graph_share", "running_max", "itl_ms_p50")
    )
    found = results(
        run(
            "on",
            level(8, 1234, accept_len=2.346, switches=2, adaptive_switches=1, graph_share=0.5),
            level(16, 99.94, server_tok_s_clean=False, **queued),
        ),
        run("bare", level(8, 10, **blind)),
    )
    rows = {
        (row[0], row[1]): dict(zip(detail_table(found).columns, row, strict=True))
        for row in detail_table(found).rows
    }
    assert list(rows) == [("8", "on"), ("8", "bare"), ("16", "on")]
    at_8 = rows["8", "on"]
    assert (at_8["server tok/s"], at_8["accept"], at_8["graphs"]) == ("1234", "2.35", "50%")
    assert (at_8["running"], at_8["switches"]) == ("8", "3")
    at_16 = rows["16", "on"]
    assert (at_16["server tok/s"], at_16["graphs"], at_16["running"]) == (
        "99.9~",
        "100% cpu",
        "8 queued",
    )
    bare = rows["8", "bare"]
    assert (bare["server tok/s"], bare["graphs"], bare["running"], bare["ITL p50"]) == ("-",) * 4


def test_boots() -> None:
    assert boot_table(results(curve("off", OFF))) is None
    found = results(run("off", boot_s=61.04, capture_s=3.0, gpu_memory_used_mib=[10, 20]))
    table = boot_table(found)
    assert table is not None
    assert table.rows == [["off", "1", "61.0", "3.0", "-", "30"]]


def test_remarks_collect_what_went_wrong() -> None:
    found = results(
        run("off", failure="did not boot: X", notes=["odd"]),
        run("on", level(1, 1, notes=["blind"]), failed_levels={"8": "refused"}),
    )
    assert remarks(found)[:4] == [
        "off, boot 1: did not boot: X",
        "off, boot 1: odd",
        "on, boot 1, C=8: failed, refused",
        "on, boot 1, C=1: blind",
    ]


@pytest.mark.parametrize(
    ("prompts", "variables", "remark"),
    [
        ("random ids, 8 tokens", {}, "random prompts draft worse"),
        ("random ids, 8 tokens", {"SGLANG_SIMULATE_ACC_LEN": "2.3"}, "acceptance was simulated"),
        ("real.txt, 9 prompts", {}, None),
    ],
)
def test_acceptance_that_is_not_that_of_traffic(
    prompts: str, variables: dict[str, str], remark: str | None
) -> None:
    found = results(curve("off", OFF))
    found.plan.load = Load(**{**LOAD.__dict__, "prompts": prompts})
    found.runs[0].environment = {"variables": variables}
    texts = remarks(found)
    assert bool(texts) is bool(remark)
    assert remark is None or remark in texts[0]


def test_a_report_in_a_pipe_is_plain_and_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep()
    print_report(found, recommend(found.runs, 0.02), ["a warning [not markup]"], markdown=False)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "…" not in out
    assert "- a warning [not markup]" in out
    assert "Recommended N = " in out
    assert "threshold=4 / max(on, off)" in out


def test_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep()
    print_report(found, recommend(found.runs, 0.02), [], markdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert "| variant | 1 | 16 |" in lines
    assert "| --- | ---: | ---: |" in lines
    assert "| threshold=4 | 300 ±2.0% | 2865 ±0.5% |" in lines


def test_nothing_measured_is_still_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(run("off", failure="did not boot: X"))
    print_report(found, recommend(found.runs, 0.02), [], markdown=False)
    out = capsys.readouterr().out
    assert "off, boot 1: did not boot: X" in out
    assert "No recommendation" in out


@pytest.mark.parametrize(
    "found",
    [
        sweep(),
        sweep(graph_share=0.1),
        results(curve("off", OFF)),
        results(curve("off", {1: 10.0})),
        results(curve("off", OFF), curve("on", {1: 300.0})),
        results(curve("off", OFF), curve("on", ON), curve("adaptive", {1: 300.0, 16: 100.0})),
    ],
)
def test_chart_is_1000_pixels_wide(found: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.png"
    draw_chart(found, path, recommend(found.runs, 0.02).threshold)
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") == 1000


def test_chart_says_what_was_measured() -> None:
    found = sweep()
    for each in found.runs:
        each.environment = {"gpus": [{"name": "NVIDIA H200"}], "sglang": "0.5.17"}
    found.runs[1].server = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4}
    assert subtitle(found) == (
        "NVIDIA H200, SGLang 0.5.17, EAGLE3, topk 4\n"
        "random ids, 8 tokens, 64 output tokens, temperature 0; server's decode tok/s"
    )


def test_no_chart_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ChartError, match="nothing was measured"):
        draw_chart(results(run("off", failure="f")), tmp_path / "chart.png", None)


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ChartError, match=r"sglang-spec-ext\[bench\]"):
        draw_chart(sweep(), tmp_path / "chart.png", None)
