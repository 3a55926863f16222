"""Figures in the documents are those of the raw results that they name."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
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
