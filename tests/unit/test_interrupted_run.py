"""A test run that is told to end stops what its fixtures have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
RUN = """
from pathlib import Path
import time
import pytest

@pytest.fixture(scope="session")
def server():
    yield
    Path("stopped").touch()

def test_that_takes_long(server):
    Path("started").touch()
    time.sleep(60)
"""


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "xdist"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_fixtures_end(processes: tuple[str, ...], number: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_long.py").write_text(RUN)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *processes]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        deadline = time.monotonic() + 50
        while not (tmp_path / "started").exists():
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(run.pid, number)  # `timeout` and a terminal signal the whole group
        assert run.wait(30) == pytest.ExitCode.INTERRUPTED
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    assert (tmp_path / "stopped").exists()
