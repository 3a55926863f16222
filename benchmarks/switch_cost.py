#!/usr/bin/env python3
"""What one switch costs a server under constant load, in milliseconds and in target-only steps.

    SGLANG_SIMULATE_ACC_LEN=4 python -m sglang.launch_server ... --speculative-num-draft-tokens 4 \\
        --speculative-disable-batch-threshold 24
    python benchmarks/switch_cost.py --url http://127.0.0.1:30000 --concurrency 16

N moves between 0 and its value by `/set_internal_state`, so that no request comes or goes with a
switch. One of the requests is watched: a step is the time between two of its chunks, and one that
brings several tokens speculated. Hence the simulated acceptance of every draft token. The cost of a
switch is the time that the `AROUND` steps before it and those from it on took, beyond what is usual
between it and the switches next to it. The same is taken around requests that set N to what it is:
what they cost, a switch did not.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import machine

sys.path.insert(0, str(machine.ROOT))  # the client of this checkout, installed or not

from sglang_spec_ext.ops.bench.client import Client, LoadError
from sglang_spec_ext.ops.bench.prompts import PromptsError, RandomIds, vocab_size_of
from sglang_spec_ext.ops.bench.server import freeze_gc, server_info

AROUND = 5
KINDS = ("to target-only", "to speculating", "no switch")


class CostError(ValueError):
    """There are no costs to be had; the message says why."""


@dataclass(frozen=True)
class Step:
    """at: when its tokens arrived, in seconds; ms: since those of the step before."""

    at: float
    ms: float
    speculated: bool


def steps_of(chunks: Sequence[tuple[float, int]]) -> list[Step]:
    """
    Args:
        chunks: arrival in seconds, and tokens received by then.
    """
    return [Step(t1, 1e3 * (t1 - t0), n1 - n0 > 1) for (t0, n0), (t1, n1) in pairwise(chunks)]


def settled(confirmed: Sequence[float], begin: float, end: float) -> tuple[float, float]:
    """The longest part of a load at whose ends no switch is under way: from one request that left
    N as it was to another, each half a period after N was moved. Steps show a switch some steps
    after the move, so elsewhere one of the two could be inside without the other.

    Args:
        confirmed: when N was set to what it is, in seconds.
        begin, end: from when and until when all requests of the load ran.
    Raises:
        CostError: there is no such part.
    """
    inside = [at for at in confirmed if begin < at < end]
    if len(inside) < 2:
        raise CostError("the load ended before N was moved: raise --output-tokens")
    return inside[0], inside[-1]


def costs_of(
    steps: Sequence[Step], moved: Sequence[float], confirmed: Sequence[float]
) -> dict[str, Any]:
    """Costs by kind, in ms, and how long a step of either mode usually took.

    Args:
        moved: when N was moved, in seconds.
        confirmed: when N was set to what it is.
    Raises:
        CostError: the steps do not show the switches that were asked for.
    """
    changes = [at for at in range(1, len(steps)) if _changed(steps, at)]
    if len(changes) != len(moved):
        raise CostError(
            f"N was moved {len(moved)} times, and the watched request shows {len(changes)} "
            "switches: run the server with SGLANG_SIMULATE_ACC_LEN set to the number of tokens "
            "that a verify accepts at most"
        )
    costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ends = [0, *changes, len(steps)]
    for before, change, after in zip(ends, changes, ends[2:], strict=False):
        usual = (_usual(steps[before:change]), _usual(steps[change:after]))
        window = steps[change - AROUND : change + AROUND]
        if min(change - before, after - change) <= AROUND:
            raise CostError(
                f"{min(change - before, after - change)} steps between two switches are too few: "
                "--period is too short"
            )
        excess = sum(step.ms - usual[place >= AROUND] for place, step in enumerate(window))
        costs[KINDS[steps[change].speculated]].append(excess)
    for asked in confirmed:
        first = next((at for at, step in enumerate(steps) if step.at > asked), len(steps))
        window = steps[max(first - AROUND, 0) : first + AROUND]
        if len({step.speculated for step in window}) == 1 and len(window) == 2 * AROUND:
            usual_ms = _usual(steps[max(first - 4 * AROUND, 0) : first + 4 * AROUND])
            costs["no switch"].append(sum(step.ms - usual_ms for step in window))
    return {
        "costs_ms": costs,
        "step_ms": {
            "target-only": _usual([step for step in steps if not step.speculated]),
            "speculating": _usual([step for step in steps if step.speculated]),
        },
    }


def _changed(steps: Sequence[Step], at: int) -> bool:
    return steps[at].speculated != steps[at - 1].speculated


def _usual(steps: Sequence[Step]) -> float:
    return median(step.ms for step in steps)


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| | times | median ms | quartiles ms | target-only steps |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for kind in KINDS:
        costs = result["costs_ms"][kind]
        if not costs:
            lines.append(f"| {kind} | 0 | - | - | - |")
            continue
        low, middle, high = quantiles(costs, n=4) if len(costs) > 1 else 3 * costs
        steps = middle / result["step_ms"]["target-only"]
        row = (kind, len(costs), f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{steps:.2f}")
        lines.append(f"| {' | '.join(str(cell) for cell in row)} |")
    return "\n".join(lines)


def set_threshold(url: str, threshold: int) -> None:
    body = {"server_args": {"speculative_disable_batch_threshold": threshold}}
    request = urllib.request.Request(
        f"{url}/set_internal_state",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
    except urllib.error.HTTPError as error:
        raise CostError(f"/set_internal_state: HTTP {error.code}: {error.read()!r}") from error
    except OSError as error:
        raise CostError(f"/set_internal_state: {error}") from error


def measure(url: str, concurrency: int, output_tokens: int, period_s: float) -> dict[str, Any]:
    """Load the server, move N until the load ends, and leave N as it was."""
    info = server_info(url, None)
    states = info.get("internal_states") or [{}]
    ours = states[0].get("sglang_spec_ext")
    if ours is None:
        raise CostError(f"no server with the threshold answers at {url}")
    threshold = ours["threshold"]
    if threshold < concurrency:
        raise CostError(f"N = {threshold}: at most as many requests can speculate")
    freeze_gc(url, None)
    prompts = RandomIds(128, vocab_size_of(str(info["model_path"])) or 32000)
    client, traces, failures = Client(url, None, 1, 120.0), [], []

    def load() -> None:
        try:
            asked = prompts.for_level(concurrency, seed=0)
            traces.extend(client.run(asked, concurrency, output_tokens))
        except LoadError as error:
            failures.append(error)

    moved, confirmed = [], []
    loading = threading.Thread(target=load)
    loading.start()
    now = threshold
    try:
        while loading.is_alive():
            for times, wanted in ((confirmed, now), (moved, threshold - now)):
                loading.join(period_s / 2)
                if loading.is_alive():
                    times.append(time.perf_counter())
                    set_threshold(url, wanted)
                    now = wanted
    finally:
        loading.join()
        set_threshold(url, threshold)
    if failures:
        raise CostError(str(failures[0]))
    begin, end = settled(
        confirmed, max(trace.first_token for trace in traces), min(trace.end for trace in traces)
    )
    steps = [step for step in steps_of(traces[0].chunks) if begin < step.at < end]
    inside = [[at for at in times if begin < at < end] for times in (moved, confirmed)]
    return {
        "machine": machine.describe(),
        "server": {
            name: info.get(name)
            for name in ("version", "attention_backend", "speculative_eagle_topk", "tp_size")
        },
        "load": {"concurrency": concurrency, "output_tokens": output_tokens},
        "threshold": threshold,
        **costs_of(steps, *inside),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--concurrency", type=int, default=16, help="at most N; default 16")
    parser.add_argument("--output-tokens", type=int, default=2400, help="default 2400")
    parser.add_argument("--period", type=float, default=0.25, help="seconds between switches")
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "switch-cost.json")
    options = parser.parse_args(arguments)
    try:
        result = measure(
            options.url.rstrip("/"), options.concurrency, options.output_tokens, options.period
        )
    except (CostError, PromptsError) as error:
        print(error, file=sys.stderr)
        return 1
    print(table(result))
    machine.write(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
