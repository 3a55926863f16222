"""Look into the scheduler process of a running server, and put faults into it (see probes/)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_servers import Server

from testbed import engine

_PROBES = Path(__file__).parent / "probes"
_VERIFY = re.compile(r"spec-ext probe: verify rid=(\S+) position=(\d+) accepted=(\d+)")
IDLE_TIMEOUT_S = 5.0


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
    """What probes/ adds to /server_info about the only scheduler process."""
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


def verifies(log: list[str], rid: str) -> list[tuple[int, int]]:
    """(position, accept length) of each verify of request ``rid`` in these log lines."""
    found = (_VERIFY.search(line) for line in log)
    return [(int(m[2]), int(m[3])) for m in found if m and m[1] == rid]
