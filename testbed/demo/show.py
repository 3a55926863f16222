"""The demo itself: a server that switches, a plain one, and whether all of it held."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from testbed import engine
from testbed.demo import DemoError
from testbed.demo.screen import Screen
from testbed.demo.server import Server, running_server
from testbed.demo.server_log import SPECULATING, TARGET_ONLY, Switch
from testbed.demo.verdict import (
    Check,
    Event,
    Row,
    accept_check,
    mode_check,
    output_check,
    rate,
    split_at_switches,
    summarize,
    switch_check,
)
from testbed.demo.workload import BURST, PHASES, THRESHOLD, Answers, Phase, run_phase

_TAIL = f"burst, {THRESHOLD} or fewer left"
_LOOK_S = 0.1


@dataclass
class Observation:
    """One phase on the switching server."""

    phase: Phase
    answers: Answers
    events: list[Event]

    def rows(self) -> list[Row | None]:
        """One row; two for the burst: above the threshold, and back at it. None: no step yet."""
        answers = self.answers
        end = max((when for when, _ in answers.arrivals), default=answers.start)
        if not self.phase.together:
            whole = rate(answers.arrivals, answers.start, end)
            return [summarize(self.phase.name, self.events, whole)]
        # The server's own moment of the switch is in its log, to the second only.
        back = BURST - THRESHOLD
        split = answers.ends[back - 1] if len(answers.ends) >= back else end
        parts = split_at_switches(self.events)
        above, after = (parts[1], parts[2]) if len(parts) == 3 else (parts[-1], [])
        return [
            summarize(self.phase.name, above, rate(answers.arrivals, answers.start, split)),
            summarize(_TAIL, after, rate(answers.arrivals, split, end)),
        ]


def show(logs: Path | None) -> int:
    """Runs the demo and prints it; the exit status is 0 if everything held, else 1.

    logs: a folder to keep the servers' logs in. Raises DemoError if the test bed is incomplete.
    """
    for model in (engine.TARGET, engine.DRAFT):
        if not (model / "config.json").exists():
            raise DemoError(f"{model} is missing: make it with testbed/make_models.py")
    folder = logs or Path(tempfile.mkdtemp(prefix="sglang-spec-ext-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    screen = Screen()
    keep = logs is not None
    try:
        held = _demonstrate(screen, folder)
        keep = keep or not held
    except DemoError as error:
        screen.say(f"FAILED  {error}", "bold red")
        held, keep = False, True
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if keep:
        screen.say(f"The servers' logs: {folder}")
    return 0 if held else 1


def _demonstrate(screen: Screen, folder: Path) -> bool:
    screen.say(
        f"1. SGLang with --speculative-disable-batch-threshold {THRESHOLD}: lone requests, a burst "
        f"of {BURST}, lone requests again",
        "bold",
    )
    flag = {"speculative_disable_batch_threshold": THRESHOLD}
    with running_server("the server", 1, folder / "switching.log", **flag) as server, screen:
        seen = _observe(server, screen)
    screen.say("2. the same requests to SGLang without the plugin's flag or speculation", "bold")
    with running_server("plain server", None, folder / "plain.log") as server:
        plain = _plain_output(server)

    rows = [row for observation in seen for row in observation.rows()]
    events = [event for observation in seen for event in observation.events]
    ours = [ids for observation in seen for ids in observation.answers.output_ids]
    checks = judge(rows, events, ours, plain)
    switches = [event.line for event in events if isinstance(event, Switch)]
    screen.result([row for row in rows if row is not None], switches, checks)
    return all(check.held for check in checks)


def judge(
    rows: list[Row | None], events: list[Event], ours: list[list[int]], plain: list[list[int]]
) -> list[Check]:
    """What must hold. rows: lone, burst, the burst's tail, lone again."""
    lone, _, tail, again = rows
    return [
        switch_check(events, THRESHOLD),
        mode_check(rows, [SPECULATING, TARGET_ONLY, SPECULATING, SPECULATING]),
        accept_check("requests in flight across both switches", tail, lone),
        accept_check("lone requests after the burst", again, lone),
        output_check(ours, plain),
    ]


def _observe(server: Server, screen: Screen) -> list[Observation]:
    server.settled_events()  # those of the server's own warm-up
    seen: list[Observation] = []
    for phase in PHASES:
        seen.append(Observation(phase, Answers(), []))
        asyncio.run(_run_and_watch(server, screen, seen))
        _take(server.settled_events(), screen, seen)
        for row in seen[-1].rows():
            if row is not None:
                screen.row_done(row)
    return seen


async def _run_and_watch(server: Server, screen: Screen, seen: list[Observation]) -> None:
    current = seen[-1]
    requests = asyncio.create_task(run_phase(server.url, current.phase, current.answers))
    while not requests.done():
        await asyncio.wait([requests], timeout=_LOOK_S)
        _take(server.new_events(), screen, seen)
    await requests


def _take(events: list[Event], screen: Screen, seen: list[Observation]) -> None:
    """Adds what the server logged to the current phase and shows it."""
    seen[-1].events += events
    for event in events:
        if isinstance(event, Switch):
            screen.say(f"  {event.line}", "yellow")
    rows = [row for observation in seen for row in observation.rows()]
    screen.growing([row for row in rows if row is not None])


def _plain_output(server: Server) -> list[list[int]]:
    output = []
    for phase in PHASES:
        answers = Answers()
        asyncio.run(run_phase(server.url, phase, answers))
        output += answers.output_ids
    return output
