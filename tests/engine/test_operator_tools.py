"""From a --config file to a server that is known to serve, by the operator's three commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from crossing import THRESHOLD
from sglang_servers import LAUNCH_SERVER, server_environment

from sglang_spec_ext.ops.bench.server import free_port
from testbed import engine
from testbed.demo.processes import session_members

TOOL = str(Path(sys.executable).with_name("sglang-spec-ext"))
TIMEOUT_S = 400
OF_THE_TEST_BED = {"variable-unread"} | ({"tree-backend"} if engine.FIRST_RELEASE else set())
"""Findings about its variables, and about trees on a backend that it made able to draft them."""


def tool(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of one command, started as an operator would."""
    done = subprocess.run(
        [TOOL, *words],
        env=server_environment({"XDG_STATE_HOME": str(folder)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def worse_than_a_note(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        each
        for each in answer["findings"]
        if each["severity"] != "note" and each["id"] not in OF_THE_TEST_BED
    ]


def stop(session: int) -> None:
    """End a launched server, all of its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in session_members(session):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 10
        while session_members(session) and time.monotonic() < deadline:
            time.sleep(0.1)


def test_preflight_wait_and_doctor_agree_on_one_server(tmp_path: Path) -> None:
    port = free_port()
    arguments = engine.server_args(
        1, host="127.0.0.1", port=port, speculative_disable_batch_threshold=THRESHOLD
    )
    # by 0.5.23 it is deprecated, and such a flag cannot stand in a file
    del arguments["disable_cuda_graph"]
    config = tmp_path / "server.yaml"
    config.write_text(yaml.safe_dump({k.replace("_", "-"): v for k, v in arguments.items()}))
    command = [*LAUNCH_SERVER, "--config", str(config), "--disable-cuda-graph"]
    log = tmp_path / "server.log"

    _, before = tool(tmp_path, "preflight", "--json", "--", *command)
    assert worse_than_a_note(before) == []
    assert f"--speculative-disable-batch-threshold {THRESHOLD}" in before["command"]

    # no --url: the port is in the file
    code, waited = tool(tmp_path, "wait", "--launch", "--json", "--log", str(log), "--", *command)
    pid = int(log.with_name("server.log.pid").read_text())
    try:
        assert (code, waited["outcome"]) == (0, "ready"), waited
        passed = [phase["phase"] for phase in waited["phases"]]
        assert passed.index("target weights") < passed.index("HTTP start"), passed
        assert "draft weights" in passed
        (note,) = waited["notes"]
        assert note.startswith(f"spec-ext active: N={THRESHOLD}, ")

        _, running = tool(tmp_path, "doctor", "--json", "--url", f"http://127.0.0.1:{port}")
        assert worse_than_a_note(running) == []
        (ours,) = running["server"]["plugin"]
        assert (ours["threshold"], ours["unbound"]) == (THRESHOLD, [])
        assert running["server"]["launcher_confirmed"] is True
    finally:
        stop(pid)
    assert session_members(pid) == []
