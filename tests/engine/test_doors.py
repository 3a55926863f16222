"""The ways in: ``--help``, ``sgl.Engine`` and what happens without the flag.

The command line starts the servers of test_crossing.py; the other two doors, ``sglang serve`` and
the environment variable, start servers of test_other_configurations.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sglang_servers import server_environment

from sglang_spec_ext.args import FLAGS
from sglang_spec_ext.compat.contracts import ARGUMENT_SEAM, LAUNCHER, in_use

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 400


COMMANDS = {
    "help": ("-m", "sglang.launch_server", "--help"),
    "engine": (str(PROGRAMS / "engine_door.py"),),
    "functions": (str(PROGRAMS / "launcher_functions.py"),),
}
Result = subprocess.CompletedProcess[str]


def run(*command: str) -> Result:
    return subprocess.run(
        [sys.executable, *command],
        env=server_environment({}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Future[Result]]]:
    """What came of each of `COMMANDS`. Two run at a time, since each spends its time importing."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, *command) for name, command in COMMANDS.items()}


def test_help_shows_the_flags(results: dict[str, Future[Result]]) -> None:
    result = results["help"].result()
    assert result.returncode == 0
    for flag in FLAGS.values():
        assert flag in result.stdout


def test_engine_door_with_no_cap_and_never_speculating(
    results: dict[str, Future[Result]],
) -> None:
    """Keyword arguments; threshold 0; and no --max-running-requests, which SGLang would make 48."""
    result = results["engine"].result()
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert "speculative_disable_batch_threshold" in told["refused"]
    assert told["right"] == [True, True]
    assert told["verifies"] == [0, 0]
    log = result.stdout + result.stderr
    (line,) = [x for x in log.splitlines() if "spec-ext active" in x]
    assert "N=0, M=0" in line
    cap = re.search(r"max_running_requests=(\d+)", line)
    assert cap and int(cap[1]) > 48
    assert told["max_running_requests"] == int(cap[1])


def test_without_the_flag_the_launcher_has_only_the_argument_seam(
    results: dict[str, Future[Result]],
) -> None:
    result = results["functions"].result()
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    seam = {point.target for point in in_use(ARGUMENT_SEAM)}
    assert set(told["without_flag"]) == seam
    assert set(told["with_flag"]) == seam | {point.target for point in in_use(LAUNCHER)}
