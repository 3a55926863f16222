"""Look into the scheduler process of a running server, and put faults into it (see probes/)."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sglang_servers import Server

from testbed import engine

_PROBES = Path(__file__).parent / "probes"
_VERIFY = re.compile(r"spec-ext probe: verify rid=(\S+) position=(\d+) accepted=(\d+)")
_STATE = "spec-ext probe: state "
_RANK = re.compile(r"^\[[^]]* TP(\d+)\]")
IDLE_TIMEOUT_S = 5.0
N, M = "speculative_disable_batch_threshold", "speculative_resume_batch_threshold"
"""What `change` calls them."""


@dataclass(frozen=True)
class Faults:
    """Faults that can be turned on and off in the running servers that `environment` is given to.

    folder: holds a file per fault that is on.
    """

    folder: Path

    def environment(self, at_import: str = "") -> dict[str, str]:
        """Variables of a server with probes; at_import: a fault that is there from the start."""
        path = os.pathsep.join([engine.environment()["PYTHONPATH"], str(_PROBES)])
        return {
            "PYTHONPATH": path,
            "SPEC_EXT_TEST_FAULTS": str(self.folder),
            "SPEC_EXT_TEST_FAULT": at_import,
        }

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Have the fault ``name`` inside the block."""
        file = self.folder / name
        file.touch()
        try:
            yield
        finally:
            file.unlink()


def scheduler_state(server: Server) -> dict[str, Any]:
    """What probes/ adds to /server_info about the scheduler process of the first rank."""
    response = server.client.get("/server_info")
    response.raise_for_status()
    (state,) = response.json()["internal_states"]
    probe: dict[str, Any] = state["probe"]
    return probe


def pool_gap(server: Server, capacity: int) -> str | None:
    """What is missing from the pools of an idle server, None if they are as full as at boot.

    Must be asked before the cache is flushed: SGLang's flush resets the pools, leaks and all.
    capacity: KV slots.
    """
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        # the last answer can reach the client before the scheduler has cleaned up after it
        state = scheduler_state(server)
        slots = state["kv_slots_free"] + state["kv_slots_cached"]
        rows = state["request_rows_free"]
        if slots == capacity and rows == state["request_rows"]:
            return None
        if time.monotonic() > deadline:
            return f"{slots} of {capacity} KV slots, {rows} of {state['request_rows']} request rows"
        time.sleep(0.1)


def states_by_rank(server: Server, ranks: int) -> list[dict[str, Any]]:
    """`scheduler_state` of each rank; SGLang itself hands out that of the first only."""
    seen = len(server.log())
    scheduler_state(server)
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        # the first rank's answer can reach the client before another rank has got to the request
        lines = server.log()[seen:].splitlines()
        said = {rank_of(line): line.partition(_STATE)[2] for line in lines if _STATE in line}
        if said.keys() == set(range(ranks)):
            return [json.loads(said[rank]) for rank in range(ranks)]
        assert time.monotonic() < deadline, f"only these ranks tell their state: {sorted(said)}"
        time.sleep(0.1)


def rank_of(line: str) -> int:
    """The tensor-parallel rank that wrote a line of the log; 0 where there is only one."""
    found = _RANK.match(line)
    return int(found[1]) if found else 0


def verifies(log: list[str], rid: str) -> list[tuple[int, int]]:
    """(position, accept length) of each verify of request ``rid`` in these lines of rank 0."""
    found = (_VERIFY.search(line) for line in log if rank_of(line) == 0)
    return [(int(m[2]), int(m[3])) for m in found if m and m[1] == rid]


def our_state(server: Server) -> dict[str, Any]:
    """What the plugin adds to /server_info."""
    (state,) = server.client.get("/server_info").json()["internal_states"]
    ours: dict[str, Any] = state["sglang_spec_ext"]
    return ours


def change(server: Server, **values: Any) -> httpx.Response:
    """The answer to a /set_internal_state with these ``server_args``."""
    return server.client.post("/set_internal_state", json={"server_args": values})
