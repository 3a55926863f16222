"""Logs of real boots (paths shortened, nothing else): one per release and machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from wait_logs import At
from wait_replay import Replay

from sglang_spec_ext.ops.wait.boot import Outcome
from sglang_spec_ext.ops.wait.liveness import Vitals

LOGS = Path(__file__).parents[1] / "fakes" / "logs"
PHASES = {
    "sglang-0.5.17-h200-eagle3.log": [
        "waiting for the log", "arguments", "distributed init", "target weights", "draft weights",
        "memory pool", "graph capture", "draft graph capture", "HTTP start",
    ],
    "sglang-0.5.23-cpu-eagle3.log": [
        "waiting for the log", "arguments", "distributed init", "target weights", "draft weights",
        "memory pool", "HTTP start",
    ],
}  # fmt: skip


# Two boots in one file: the first one's scheduler was killed while it served.
TWICE = "sglang-0.5.23-cpu-killed-and-restarted.log"


def lines(name: str, before: bytes = b"") -> list[At]:
    """The log with one second between lines; ``before`` is put in front of each."""
    data = (LOGS / name).read_bytes()
    return [At(float(at), before + line) for at, line in enumerate(data.splitlines(keepends=True))]


def test_every_recorded_log_is_tested() -> None:
    assert {path.name for path in LOGS.iterdir()} == {*PHASES, TWICE}


@pytest.mark.parametrize("before", [b"", b"sglang-1  | ", b"2026-11-29T20:16:21.123Z stderr F "])
@pytest.mark.parametrize("name", PHASES)
def test_a_real_boot_goes_through_its_phases_without_alarm(name: str, before: bytes) -> None:
    recorded = lines(name, before)
    end = recorded[-1].second
    replay = Replay(vitals=lambda now: Vitals(alive=True, cpu_seconds=now))
    replay.health = lambda now: "ok" if now > end else "refused"
    verdict = replay.run(recorded, then=5)
    assert verdict is not None and verdict.outcome is Outcome.READY
    phases = [span.phase.value for span in replay.boot.spans]
    assert phases == [*PHASES[name], "first token"]
    arguments = replay.boot.arguments
    assert arguments is not None
    assert (arguments.speculative_algorithm, arguments.ranks) == ("EAGLE3", ("",))
    assert arguments.model_path == "testbed/models/target"


@pytest.mark.parametrize("name", PHASES)
def test_the_same_boot_that_dies_in_the_middle(name: str) -> None:
    recorded = lines(name)
    end = recorded[len(recorded) // 2].second
    replay = Replay(vitals=lambda now: Vitals(alive=now < end, exit_code=-9))
    verdict = replay.run(recorded[: len(recorded) // 2], then=20)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED
    assert "exit code -9" in verdict.reason


def test_a_real_plugin_that_fails_to_load_is_a_note_in_every_process() -> None:
    replay = Replay()
    replay.run(lines("sglang-0.5.23-cpu-eagle3.log"))
    assert list(replay.boot.notes.values()) == [
        "Failed to load plugin spec_ext from group sglang.srt.plugins: ModuleNotFoundError: No "
        "module named 'sglang_spec_ext.plugin'"
    ]


def test_a_real_scheduler_that_was_killed() -> None:
    recorded = lines(TWICE)
    dead = next(at for at, line in enumerate(recorded) if b"Sleeping 5 seconds" in line.data)
    replay = Replay(token_error=lambda _: "no answer within 60 s")
    replay.health = lambda now: "ok" if now > recorded[dead].second - 10 else "refused"
    verdict = replay.run(recorded[:dead], then=10)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED
    assert verdict.reason == "scheduler_0 ended with exit code -9"
    assert "OOM killer" in verdict.hint


def test_the_real_restart_after_it_is_a_new_boot() -> None:
    replay = Replay()
    for line in lines(TWICE):
        replay.boot.on_records(replay.reader.feed(line.data), 0.0, old=True)
    replay.health = lambda now: "ok"
    verdict = replay.run([], then=5)
    assert verdict is not None and verdict.outcome is Outcome.READY
    assert replay.boot.boots == 2
    assert replay.boot.notes == {}
