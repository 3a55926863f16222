"""Engines for the engine tests: SGLang servers on CPU, shared by configuration."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from crossing import CAPACITY, CROSSING, LoadMissed
from probing import Faults, pool_gap
from sglang_servers import Server, Servers

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder, and skip it where SGLang is not installed."""
    missing = importlib.util.find_spec("sglang") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # Not a product failure: on a starved machine the burst can come when the long requests
            # have already ended.
            item.add_marker(pytest.mark.flaky(reruns=4, only_rerun=[LoadMissed]))
            if missing:
                item.add_marker(pytest.mark.skip(reason="SGLang is not installed"))


@pytest.fixture(scope="session")
def engines() -> Iterator[Servers]:
    """``engines.get(topk, **flags)``: a running server of that configuration."""
    running = Servers(keep=3)
    yield running
    running.stop_all()


# ------------------------------------------------------------------ crossing the threshold
@pytest.fixture(scope="session", params=[1, 4], ids=["topk1", "topk4"])
def topk(request: pytest.FixtureRequest) -> int:
    """Of session scope, so that pytest groups the tests by it and each engine boots once."""
    value: int = request.param
    return value


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def crossing_server(engines: Servers, topk: int, faults: Faults) -> Iterator[Server]:
    """A server that crosses its threshold; when the test is over, its KV pool must be full."""
    # by default SGLang ends a process that leaks; here the test is to report it
    env = {**faults.environment(), "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}
    server = engines.get(topk, env=env, **CROSSING)
    yield server
    assert pool_gap(server, CAPACITY) is None


@pytest.fixture
def static_server(engines: Servers, topk: int, faults: Faults) -> Server:
    """Speculative decoding without the plugin's flag: it is never off."""
    return engines.get(topk, env=faults.environment())


@pytest.fixture
def plain_server(engines: Servers, faults: Faults) -> Server:
    """The target alone, without the plugin's flag: what every output is compared with."""
    return engines.get(None, env=faults.environment())
