"""With the flag given, a server that could not honour it stops before it serves, and says why."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crossing import THRESHOLD
from probing import Faults
from sglang_servers import server_environment

from sglang_spec_ext.ops.bench.server import free_port
from testbed import engine
from testbed.demo.processes import session_members

END_TIMEOUT_S = 550.0
READY = "fired up and ready to roll"


UNBOUND = {
    "lost_in_scheduler": "SchedulerMetricsReporter.update_spec_metrics",
    "hidden_in_scheduler": "scheduler process 0 did not load the plugin",
    "hidden_in_second_rank": "scheduler process 1 did not load the plugin",
    "lost_in_launcher": "Engine._launch_subprocesses",
}
if engine.FIRST_RELEASE:
    UNBOUND["lost_in_scheduler"] = "SchedulerMetricsMixin.log_decode_stats"
    UNBOUND["lost_in_launcher"] = "engine._launch_subprocesses"
"""What the message names, by the fault that probes/ puts into a process."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adaptive": ({"speculative_adaptive": True}, "does not work with --speculative-adaptive"),
    "no algorithm": ({"topk": None}, "needs a speculative algorithm, and none is given"),
}
"""Arguments, ``env`` among them, and what is said of them."""
if engine.FIRST_RELEASE:
    del REFUSED["adaptive"]
    other_worker = {"env": {"SGLANG_ENABLE_SPEC_V2": "1"}}
    REFUSED["spec-v2 worker"] = (other_worker, "does not work with the spec-v2 worker")
BAD_DRAFT = "a draft of another target, without the flag"
Ending = tuple[int, str]


def bad_draft(folder: Path) -> dict[str, Any]:
    """Arguments with the test bed's draft, made to expect states of another width."""
    config = json.loads((engine.DRAFT / "config.json").read_text())
    config["target_hidden_size"] = 2 * config["hidden_size"]
    draft = folder / "draft"
    shutil.copytree(engine.DRAFT, draft)
    (draft / "config.json").write_text(json.dumps(config))
    return {
        "speculative_draft_model_path": str(draft),
        "speculative_disable_batch_threshold": None,
    }


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[dict[str, Any]]:
    """By case: a future `Ending`. Two run at a time, since each spends its time importing."""
    with ThreadPoolExecutor(2) as pool:

        def start(env: dict[str, str], **flags: Any) -> Future[Ending]:
            arguments = {"speculative_disable_batch_threshold": THRESHOLD, **flags}
            return pool.submit(run_to_its_end, tmp_path_factory.mktemp("end"), env, **arguments)

        def start_with(fault: str) -> Future[Ending]:
            env = faults.environment(fault)
            if fault == "hidden_in_second_rank":
                return start(env | engine.TWO_RANKS, tp_size=2)
            return start(env)

        yield (
            {fault: start_with(fault) for fault in UNBOUND}
            | {case: start(**{"env": {}, **flags}) for case, (flags, _) in REFUSED.items()}
            | {BAD_DRAFT: start({}, **bad_draft(tmp_path_factory.mktemp("draft")))}
        )


def run_to_its_end(folder: Path, env: dict[str, str], topk: int | None = 1, **flags: Any) -> Ending:
    """Exit status and log of a server that must end by itself before it serves."""
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            engine.command_line(topk, port=free_port(), **flags),
            env=server_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = process.wait(END_TIMEOUT_S)
        deadline = time.monotonic() + 20
        while left := session_members(process.pid):
            assert time.monotonic() < deadline, f"it leaves processes behind: {left}"
            time.sleep(0.1)
    finally:
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
    text = log.read_text(errors="replace")
    assert READY not in text
    return status, text


@pytest.mark.parametrize("fault", UNBOUND)
def test_a_hook_that_does_not_bind_stops_the_server(
    endings: dict[str, Future[Ending]], fault: str
) -> None:
    status, log = endings[fault].result()
    assert status != 0
    said = log[log.index("--speculative-disable-batch-threshold cannot take effect with SGLang") :]
    named = UNBOUND[fault]
    assert f"\n  - {named}" in said or named in said.splitlines()[1]
    assert "Works with SGLang" in said
    assert "or start without --speculative-disable-batch-threshold" in said


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_in_one_line_before_weights_load(
    endings: dict[str, Future[Ending]], case: str
) -> None:
    status, log = endings[case].result()
    assert status != 0
    (line,) = [line for line in log.splitlines() if line.startswith("sglang_spec_ext: error: ")]
    assert "--speculative-disable-batch-threshold" in line
    assert REFUSED[case][1] in line
    assert "Traceback" not in log
    assert "Load weight" not in log


def test_a_bad_draft_stops_the_server_before_weights_load(
    endings: dict[str, Future[Ending]],
) -> None:
    status, log = endings[BAD_DRAFT].result()
    assert status != 0
    said = log[log.index("sglang_spec_ext: error: the draft ") :]
    assert "would not draft as it was trained to:\n  - " in said
    assert "sglang-spec-ext check-draft --target" in said
    assert "--speculative-draft-check warn starts the server all the same" in said
    assert "Traceback" not in log
    assert "Load weight" not in log
