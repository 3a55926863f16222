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
from sglang_servers import CLOSED, Server, server_environment, with_site

from sglang_spec_ext.compat import contracts, diffs, workers
from sglang_spec_ext.runtime_state import STATE_KEY
from testbed import engine, prompts

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = "scheduler"
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


@pytest.fixture(scope="module")
def partly(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without one of the diffs, as after a reinstallation of some of the files."""
    folder = tmp_path_factory.mktemp("partly")
    shutil.copytree(site / "sglang", folder / "sglang")
    taken = ("revert", "--only", LEFT_OUT, "--site", str(folder))
    done = tool("apply_patches.py", *taken, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


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
    used = workers.contract(installed)  # one release has two workers, and a process hooks one
    launcher = {p.target for p in contracts.in_use(contracts.ARGUMENT_SEAM + used.launcher)}
    assert {t for t, place in told["loaded"].items() if place["slot"]} == launcher
    scheduler = {p.target for p in contracts.in_use(used.scheduler + contracts.LOADING)}
    assert {t for t, place in told["then"].items() if place["slot"]} == launcher | scheduler
    for target, place in told["then"].items():
        assert len(set(place["slot"])) == len(place["slot"]), (target, place)
        assert place["elsewhere"] == [], (target, place)
    assert told["unbound"] == []


# ------------------------------------------------------------------------------ one diff missing


def test_without_one_diff_our_flag_stops_the_start_and_names_it(partly: Path) -> None:
    """At the first import: no argument is parsed yet, and nothing loads."""
    command = engine.command_line(1, speculative_disable_batch_threshold=THRESHOLD)
    env = with_site(partly, server_environment(CLOSED))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "--speculative-disable-batch-threshold cannot take effect" in last
    assert f"patches/{engine.installed_release()}, these are not applied: {LEFT_OUT}." in last
    assert "python apply_patches.py apply" in last
    assert "usage:" not in done.stderr + done.stdout


def test_without_one_diff_and_without_our_flag_it_serves(partly: Path) -> None:
    started = Server.start(1, env=with_site(partly, server_environment(CLOSED)), sleep_on_idle=True)
    try:
        starts = [prompts.prompt_ids(seed) for seed in (40, 41)]
        for start, answer in zip(starts, started.greedy(starts, LONG // 5), strict=True):
            assert answer["output_ids"] == prompts.continue_ids(start, LONG // 5)
            assert answer["meta_info"]["spec_accept_length"] > ACCEPTED
    finally:
        started.stop()


def test_without_one_diff_the_plugin_itself_does_the_rest_where_it_may(
    partly: Path, faults: Faults
) -> None:
    started = Server.start(1, env=with_site(partly, faults.environment()), **CROSSING)
    try:
        long = language_bodies(2, LONG, first_seed=50)
        assert_language(cross(started, long, language_bodies(6, SHORT, first_seed=60)))
        (state,) = started.client.get("/server_info").json()["internal_states"]
        assert state[STATE_KEY]["unbound"] == []
        concern = set(diffs.CONCERNS[LEFT_OUT])
        replaced = {name.rpartition(".")[2] for name in scheduler_state(started)["replaced"]}
        points = workers.hooked(contracts.site_dir() or partly)
        assert replaced
        assert replaced <= {p.qualname.rpartition(".")[2] for p in points if p.name in concern}
    finally:
        started.stop()
