"""The test bed's kernels against SGLang's own Triton kernels, run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import engine

KERNELS = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

Report = dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """By kernel: what its cases found. One process for all, since importing SGLang is slow."""
    result = tmp_path_factory.mktemp("stand-ins") / "report.json"
    program = Path(__file__).with_name("stand_in_cases.py")
    env = os.environ | engine.environment() | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, str(program), str(result)], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report: Report = json.loads(result.read_text())
    return report


@pytest.mark.parametrize("kernel", KERNELS)
def test_stand_in_equals_sglangs_own_kernel(report: Report, kernel: str) -> None:
    cases = report[kernel]
    assert cases, "no case ran"
    found = [f"{case}: {line}" for case, lines in cases.items() for line in lines]
    assert not found, "\n".join(found)


def test_no_stand_in_is_untested(report: Report) -> None:
    assert sorted(report) == KERNELS
