"""A target with latent attention (MLA), whose KV pool and kernels are others, crosses as well."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_mla
from crossing import CAPACITY, CROSSING, ask_all, cross, language_bodies
from probing import Faults, pool_gap
from sglang_servers import Server, Servers

SHORT, LONG = 24, 120
COMMON = {"skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    tiny_mla.write(folder)
    return folder


@pytest.fixture
def server(engines: Servers, models: Path, faults: Faults) -> Iterator[Server]:
    pair: dict[str, Any] = {
        "model_path": str(models / "target"),
        "speculative_draft_model_path": str(models / "draft"),
    }
    server = engines.get(1, env=faults.environment(), **CROSSING | COMMON | pair)
    yield server
    assert pool_gap(server, CAPACITY) is None


def test_text_across_switches_is_that_of_a_plain_server(
    server: Server, engines: Servers, models: Path, faults: Faults
) -> None:
    long = language_bodies(2, LONG, first_seed=900)
    burst = language_bodies(6, SHORT, first_seed=910)
    with faults.on("compare_draft_kv"):
        crossing = cross(server, long, burst)
    differences = re.findall(r"probe: draft kv difference=(\S+)", "\n".join(crossing.log))
    assert differences and max(map(float, differences)) < 1e-5

    plain = engines.get(None, env=faults.environment(), model_path=str(models / "target"), **COMMON)
    expected = [answer["output_ids"] for answer in ask_all(plain, [*long, *burst])]
    assert len({token for ids in expected for token in ids}) > 100, "the text says something"
    assert [answer["output_ids"] for answer in crossing.answers] == expected
