#!/usr/bin/env python3
"""What decode steps spend on the GPU, from traces of the torch profiler, as a small JSON file.

    python benchmarks/trace_summary.py --out FILE NAME=TRACE.json.gz ...

A trace is what SGLang writes for `POST /start_profile` with `{"activities": ["GPU"], "num_steps":
20}` while a constant load decodes. A step lasts from one start of the sampling kernel to the next,
so a trace of 20 samplings has 19 steps. Of each trace:

- step_us, busy_us: how long each step took, and for how much of it any kernel or copy ran.
- to_attention_us: from the end of sampling to the start of the first attention kernel after it.
- launches: kernels and copies of each step. Steps with the most common number are the ordinary
  ones; a step with more does something that the others do not.
- outside_graphs: those of them that no CUDA graph launched; the trace gives what a graph launches
  one correlation.
- kernels: launches and microseconds of each kernel in a mean ordinary step.
- more: the same of what a mean step with more launches has beyond an ordinary one.

The summary has each kernel's name once, with the figures of all traces beside it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

SAMPLING = "ArgMaxOps"
ATTENTION = "_fwd_grouped_kernel_stage1"
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
NAME_LENGTH = 70
NOISE = ("void ", "at::native::", "(anonymous namespace)::", "at_cuda_detail::cub::detail::")

Costs = dict[str, tuple[float, float]]
"""By kernel: launches per step, microseconds per step."""


class TraceError(ValueError):
    """The trace shows no decode steps; the message says what is missing."""


@dataclass(frozen=True)
class Span:
    """A kernel or copy on the GPU; times in microseconds."""

    name: str
    start: float
    end: float
    in_graph: bool


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """Everything that ran on the GPU, by start."""
    events = [event for event in trace.get("traceEvents", ()) if event.get("cat") in ON_GPU]
    launched = Counter(event["args"]["correlation"] for event in events)
    spans = [
        Span(
            event["name"],
            event["ts"],
            event["ts"] + event["dur"],
            launched[event["args"]["correlation"]] > 1,
        )
        for event in events
    ]
    return sorted(spans, key=lambda span: span.start)


def steps_of(spans: Sequence[Span], sampling: str) -> list[Sequence[Span]]:
    """The whole steps, each with its own sampling first and the next step's last."""
    starts = [place for place, span in enumerate(spans) if sampling in span.name]
    if len(starts) < 2:
        raise TraceError(
            f"{len(starts)} kernels with {sampling!r} in their name, and a step lies between two; "
            "name the kernel that samples with --sampling"
        )
    return [spans[start : end + 1] for start, end in pairwise(starts)]


def busy_us(step: Sequence[Span]) -> float:
    """The time in which anything ran; what runs on two streams at once counts once."""
    end, busy, reached = step[-1].start, 0.0, step[0].start
    for span in step[:-1]:
        until = min(span.end, end)
        busy += max(0.0, until - max(span.start, reached))
        reached = max(reached, until)
    return busy


def to_attention_us(step: Sequence[Span], attention: str) -> float:
    for span in step:
        if attention in span.name:
            return span.start - step[0].end
    raise TraceError(
        f"a step without a kernel with {attention!r} in its name; name the first kernel of the "
        "target's attention with --attention"
    )


def short(name: str) -> str:
    for noise in NOISE:
        name = name.replace(noise, "")
    return name[:NAME_LENGTH]


def costs_of(steps: Sequence[Sequence[Span]]) -> Costs:
    """Of a mean step."""
    launches: Counter[str] = Counter()
    time: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        for span in step[:-1]:
            launches[short(span.name)] += 1
            time[short(span.name)] += span.end - span.start
    return {name: (launches[name] / len(steps), time[name] / len(steps)) for name in launches}


def summary(trace: dict[str, Any], sampling: str, attention: str) -> dict[str, Any]:
    """See the top of this file. Raises TraceError for a trace without decode steps."""
    steps = steps_of(spans_of(trace), sampling)
    launches = [len(step) - 1 for step in steps]
    usual = Counter(launches).most_common(1)[0][0]
    ordinary = costs_of([step for step in steps if len(step) - 1 == usual])
    fuller = costs_of([step for step in steps if len(step) - 1 > usual])
    result: dict[str, Any] = {
        "device": [gpu["name"] for gpu in trace.get("deviceProperties", [])],
        "steps": len(steps),
        "step_us": [round(step[-1].start - step[0].start, 1) for step in steps],
        "busy_us": [round(busy_us(step), 1) for step in steps],
        "to_attention_us": [round(to_attention_us(step, attention), 1) for step in steps],
        "launches": launches,
        "outside_graphs": [sum(not span.in_graph for span in step[:-1]) for step in steps],
        "kernels": {name: rounded(*cost) for name, cost in ordinary.items()},
        "more": {},
    }
    for name, (count, time) in fuller.items():
        usual_count, usual_time = ordinary.get(name, (0.0, 0.0))
        if count > usual_count:
            result["more"][name] = rounded(count - usual_count, time - usual_time)
    return result


def rounded(count: float, time: float) -> list[float]:
    return [round(count, 2), round(time, 2)]


def by_kernel(traces: dict[str, dict[str, Any]], table: str) -> dict[str, dict[str, list[float]]]:
    """The tables of all traces as one, each taken out of its trace; most time first."""
    joined: dict[str, dict[str, list[float]]] = {}
    for trace_name, trace in traces.items():
        for kernel, cost in trace.pop(table).items():
            joined.setdefault(kernel, {})[trace_name] = cost
    return dict(sorted(joined.items(), key=lambda row: -max(cost[1] for cost in row[1].values())))


def load(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    trace: dict[str, Any] = json.loads(
        gzip.decompress(content) if path.suffix == ".gz" else content
    )
    return trace


def written(result: dict[str, Any]) -> str:
    """JSON with a line for each list or kernel: to be read, and to be compared by line."""
    lines: list[str] = []
    for section, rows in result.items():
        if not isinstance(rows, dict):
            lines.append(f" {json.dumps(section)}: {json.dumps(rows)}")
            continue
        inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        lines.append(f" {json.dumps(section)}: {{\n{inner}\n }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE")
    parser.add_argument("--out", type=Path, help="default: standard output")
    parser.add_argument("--sampling", default=SAMPLING, help="in the name of the sampling kernel")
    parser.add_argument("--attention", default=ATTENTION, help="in that of the attention's first")
    options = parser.parse_args(arguments)
    traces: dict[str, dict[str, Any]] = {}
    for argument in options.traces:
        name, equals, path = argument.partition("=")
        if not equals or name in traces:
            parser.error(f"give each trace as NAME=TRACE with a name of its own, not {argument!r}")
        try:
            traces[name] = summary(load(Path(path)), options.sampling, options.attention)
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    kernels, more = by_kernel(traces, "kernels"), by_kernel(traces, "more")
    result = {
        "kernels are": "[launches, microseconds] per step",
        **traces,
        "kernels": kernels,
        "more": more,
    }
    if options.out is None:
        sys.stdout.write(written(result))
    else:
        options.out.write_text(written(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
