"""Levels, runs and results for the tests of ``bench``, with everything irrelevant filled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_spec_ext.ops.bench.results import Level, Load, Plan, Results, Run
from sglang_spec_ext.ops.bench.server import BootError, Server, await_boots, starting

LOAD = Load("random ids, 8 tokens", 64, None, 4, 16, 0)


def level(concurrency: int, tok_s: float, **facts: Any) -> Level:
    """A level whose figures are all ``tok_s``, on graphs, with every request admitted."""
    usual: dict[str, Any] = {
        "requests": 3 * concurrency,
        "output_tokens": 192 * concurrency,
        "wall_s": 1.0,
        "tok_s": tok_s,
        "ttft_ms_p50": 20.0,
        "ttft_ms_p99": 30.0,
        "itl_ms_p50": 5.0,
        "itl_ms_p99": 6.0,
        "steady_s": 0.9,
        "steady_tok_s": tok_s,
        "server_tok_s": tok_s,
        "server_tok_s_clean": True,
        "server_tok_s_lines": 9,
        "graph_backend": "cuda",
        "graph_share": 1.0,
        "running_max": concurrency,
        "at_level_share": 1.0,
        "queued": 0,
    }
    return Level(concurrency, **{**usual, **facts})


def run(variant: str, *levels: Level, boot: int = 1, **facts: Any) -> Run:
    return Run(variant, boot, ["server"], "2026-01-01T00:00:00+00:00", levels=[*levels], **facts)


def curve(variant: str, values: dict[int, float], boot: int = 1, **facts: Any) -> Run:
    """A run by concurrency -> tok/s."""
    return run(variant, *(level(c, v, **facts) for c, v in values.items()), boot=boot)


def results(*runs: Run) -> Results:
    variants = list(dict.fromkeys(each.variant for each in runs))
    concurrency = sorted({item.concurrency for each in runs for item in each.levels})
    return Results(Plan(variants, 1, concurrency, LOAD, ["server"]), [*runs])


@contextmanager
def booted(
    command: list[str], environ: Mapping[str, str], port: int, log: Path, timeout_s: float
) -> Iterator[Server]:
    """One server, up. Raises BootError if it does not come up."""
    with starting(command, environ, port, log) as server:
        for why in await_boots([server], timeout_s, lambda seconds: None).values():
            raise BootError(why)
        yield server
