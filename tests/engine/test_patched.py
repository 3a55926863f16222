"""The diffs of `patches/` on a copy of the installed SGLang, where nothing else may load us."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crossing import (
    ACCEPTED,
    CAPACITY,
    CROSSING,
    THRESHOLD,
    assert_language,
    cross,
    language_bodies,
    need,
)
from probing import Faults, pool_gap, scheduler_state, verifies
from sglang_servers import Server, server_environment

from sglang_spec_ext.compat import bootstrap, contracts, workers
from sglang_spec_ext.runtime_state import STATE_KEY
from testbed import engine

ROOT = Path(__file__).resolve().parents[2]
CLOSED = {"SGLANG_PLUGINS": "none_of_ours", bootstrap.SWITCH: "0"}
"""Every way in but the diffs."""
LONG = 450
SHORT = 30
TIMEOUT_S = 400


def tool(name: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a patched copy of the installed package, to put in front of site-packages."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(spec.origin).parent, folder / "sglang")
    done = tool("apply_patches.py", "apply", "--site", str(folder), env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def with_site(site: Path, environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "PYTHONPATH": os.pathsep.join([str(site), environment["PYTHONPATH"]])}


@pytest.fixture(scope="module")
def server(site: Path, faults: Faults) -> Iterator[Server]:
    env = {**faults.environment(), **CLOSED, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}
    started = Server.start(1, env=with_site(site, env), **CROSSING)
    yield started
    started.stop()


def test_crosses_both_ways_with_the_targets_output_and_a_warm_draft(server: Server) -> None:
    long = language_bodies(2, LONG, first_seed=10, name="long")
    crossing = cross(server, long, language_bodies(6, SHORT, first_seed=20))
    assert_language(crossing)
    for body in long:
        lengths = [n for _, n in verifies(crossing.log[crossing.resumed_at() :], body["rid"])]
        need(len(lengths) > 10, "it ended soon after the resume")
        assert sum(lengths) / len(lengths) > ACCEPTED
    assert pool_gap(server, CAPACITY) is None


def test_the_seams_did_it(server: Server) -> None:
    """No function of SGLang was replaced, and every hook is bound."""
    (start,) = [line for line in server.log().splitlines() if "spec-ext active" in line]
    assert f"N={THRESHOLD}, M={THRESHOLD}" in start
    replaced = scheduler_state(server)["replaced"]
    # the probe itself stands in for one of 0.5.9
    assert [name for name in replaced if not name.endswith("get_internal_state")] == []
    (state,) = server.client.get("/server_info").json()["internal_states"]
    assert state[STATE_KEY]["unbound"] == []
    assert state[STATE_KEY]["switches"]["target-only"] >= 1


def test_verify_imports_passes(site: Path) -> None:
    env = with_site(site, server_environment(CLOSED))
    done = tool("verify_imports.py", "--json", env=env)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert [name for name, check in checks.items() if check["status"] in ("FAIL", "SKIP")] == []
    for name in ("seams", "contract", "hooks"):
        assert checks[name]["status"] == "OK", checks[name]
    assert "hides" in checks["entry point"]["details"][0] or engine.FIRST_RELEASE


def test_with_the_plugin_loaded_too_nothing_is_hooked_twice(site: Path) -> None:
    program = str(ROOT / "tests" / "engine" / "programs" / "hooked_twice.py")
    env = with_site(site, server_environment({}))
    done = subprocess.run(
        [sys.executable, program], env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    installed = contracts.site_dir()
    assert installed is not None
    launcher = {p.target for p in contracts.in_use(workers.contract(installed).launcher)}
    seam = {point.target for point in contracts.ARGUMENT_SEAM}
    assert {t for t, place in told["loaded"].items() if place["slot"]} == launcher | seam
    for target, place in told["then"].items():
        assert len(set(place["slot"])) == len(place["slot"]) >= 1, (target, place)
        assert place["elsewhere"] == [], (target, place)
    assert told["unbound"] == []
