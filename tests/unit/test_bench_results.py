"""The result file: written whole, read back, merged, and refused when it is something else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from bench_levels import LOAD, curve, level, results, run

from sglang_spec_ext.ops.bench import results as module
from sglang_spec_ext.ops.bench.results import Load, ResultsError, load_results, merge


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = results(
        run("off", level(1, 100, notes=["n"]), failed_levels={"2": "why"}, server={"tp_size": 1}),
        run("on", level(1, 120, accept_len=2.3), boot=2, failure="f", gpu_memory_used_mib=[7]),
    )
    written.save(tmp_path / "bench.json")
    assert load_results(tmp_path / "bench.json") == written


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bench.json"
    results(curve("off", {1: 100})).save(path)
    before = path.read_text()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module.json, "dump", full)
    with pytest.raises(OSError, match="disk full"):
        results(curve("off", {1: 200})).save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["bench.json"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "no bench result"),
        ('{"runs": []}', "no bench result"),
        ('{"schema": "sglang-spec-ext-bench", "schema_version": 2}', "schema version 2"),
        ('{"schema": "sglang-spec-ext-bench", "schema_version": 1}', "lacks a field"),
        (
            '{"schema": "sglang-spec-ext-bench", "schema_version": 1, "plan": {}, "runs": []}',
            "lacks a field",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=complaint):
        load_results(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"absent\.json: No such file"):
        load_results(tmp_path / "absent.json")


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    results(curve("off", {1: 100})).save(path)
    document = json.loads(path.read_text())
    document["later"] = document["plan"]["later"] = document["runs"][0]["later"] = 1
    document["runs"][0]["levels"][0]["later"] = 1
    path.write_text(json.dumps(document))
    assert load_results(path).runs[0].levels[0].tok_s == 100


def test_missing_levels_are_those_of_no_run() -> None:
    found = results(curve("off", {1: 1, 4: 1}), curve("off", {2: 1}), curve("off", {8: 1}, boot=2))
    assert found.missing_levels("off", 1) == [8]
    assert found.missing_levels("off", 2) == [1, 2, 4]
    assert found.missing_levels("on", 1) == [1, 2, 4, 8]


def test_missing_levels_of_rounds() -> None:
    found = results(run("off", *(level(c, 1) for c in (1, 2, 1))), curve("off", {2: 1}, boot=2))
    found.plan.rounds = 2
    assert found.missing_levels("off", 1) == [2]
    assert found.missing_levels("off", 2) == [1, 1, 2]


def test_merged_files_are_one_sweep() -> None:
    merged, warnings = merge([results(curve("off", {1: 1})), results(curve("on", {1: 1, 2: 1}))])
    assert warnings == []
    assert (merged.plan.variants, merged.plan.concurrency) == (["off", "on"], [1, 2])
    assert [each.variant for each in merged.runs] == ["off", "on"]


def test_merging_what_does_not_compare_warns() -> None:
    here = results(curve("off", {1: 1}))
    there = results(curve("on", {1: 1}))
    here.runs[0].environment = {"gpus": [{"name": "A"}], "sglang": "0.5.17"}
    there.runs[0].environment = {"gpus": [{"name": "B"}], "sglang": "0.5.17"}
    there.plan.load = Load(**{**LOAD.__dict__, "output_tokens": 32})
    _, warnings = merge([here, there])
    assert len(warnings) == 2
    assert "different loads: output_tokens" in warnings[0]
    assert "runs differ in gpus" in warnings[1]


def test_merging_servers_of_which_some_had_their_gc_frozen_warns() -> None:
    before, since = curve("off", {1: 1}), curve("on", {1: 1})
    since.server["gc_frozen"] = True
    _, warnings = merge([results(before), results(since)])
    assert len(warnings) == 1 and "garbage collection was frozen in some" in warnings[0]
    before.server["gc_frozen"] = True
    assert merge([results(before), results(since)])[1] == []


@pytest.mark.parametrize(
    ("asked", "concurrency", "requests"),
    [(None, 1, 8), (None, 2, 8), (None, 16, 48), (1, 1, 2), (10, 4, 10), (10, 16, 32)],
)
def test_requests_per_level(asked: int | None, concurrency: int, requests: int) -> None:
    load = Load(**{**LOAD.__dict__, "requests_per_level": asked})
    assert load.requests_at(concurrency) == requests
