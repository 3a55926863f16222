"""The measuring itself: boots servers, or takes a running one, and walks the levels of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from sglang_spec_ext.ops.bench.client import Client, LoadError
from sglang_spec_ext.ops.bench.crossover import levels_of
from sglang_spec_ext.ops.bench.environment import (
    describe_machine,
    describe_server,
    gpu_memory_used_mib,
)
from sglang_spec_ext.ops.bench.figures import client_figures
from sglang_spec_ext.ops.bench.progress import Reporter
from sglang_spec_ext.ops.bench.prompts import Prompts
from sglang_spec_ext.ops.bench.results import Level, Load, Results, Run, now
from sglang_spec_ext.ops.bench.server import (
    BootError,
    Server,
    ServerLog,
    await_boots,
    free_port,
    freeze_gc,
    server_info,
    starting,
)
from sglang_spec_ext.ops.bench.server_log import BootLog, LevelLog, read_boot, read_level
from sglang_spec_ext.ops.bench.variants import (
    Variant,
    command_for,
    environment_for,
    redacted,
)

# The settings of a server that explain its figures, as /server_info names them.
_SERVER_FACTS = (
    "version",
    "model_path",
    "dtype",
    "attention_backend",
    "tp_size",
    "dp_size",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_adaptive",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "max_total_num_tokens",
    "skip_tokenizer_init",
)

_GC_NOT_FROZEN = (
    "it refused /freeze_gc: a full garbage collection of its HTTP process can hold up a wave of "
    "requests, which shows in end-to-end figures"
)


@dataclass(frozen=True)
class Session:
    """What every measurement of this call shares. ``prompts_for`` builds the prompts once a server
    is known, since random ids depend on its vocabulary; ``save`` writes the results so far."""

    results: Results
    save: Callable[[], None]
    prompts_for: Callable[[dict[str, Any]], Prompts]
    reporter: Reporter
    api_key: str | None
    request_timeout_s: float

    @property
    def load(self) -> Load:
        return self.results.plan.load


@dataclass(frozen=True)
class Launch:
    """How the servers of a sweep are started. ``together`` of them are up at once."""

    base: Sequence[str]
    environ: Mapping[str, str]
    logs: Path
    boot_timeout_s: float
    together: int = 1


def sweep_variants(session: Session, variants: Sequence[Variant], launch: Launch) -> None:
    """Boots and measures what the plan still lacks, one server under load at a time.

    Every variant is booted once before any is booted again, and every level measured before any is
    measured again, so that a slow drift of the machine shows as spread instead of favouring one of
    them, and an interrupted sweep is complete sooner. Servers that are up at once take turns level
    by level, for the same reason.
    """
    results = session.results
    for boot in range(1, results.plan.boots + 1):
        lacking = [v for v in variants if results.missing_levels(v.label, boot)]
        for group in _groups_of(launch.together, lacking):
            _boot_and_measure(session, group, boot, launch)


def _groups_of(size: int, variants: Sequence[Variant]) -> Iterator[Sequence[Variant]]:
    for start in range(0, len(variants), size):
        yield variants[start : start + size]


def sweep_running(session: Session, label: str, url: str, log: Path | None) -> None:
    """Measures a server that somebody else runs."""
    missing = session.results.missing_levels(label, boot=1)
    if not missing:
        return
    info = server_info(url, session.api_key)
    run = Run(label, 1, command=None, started=now(), environment=describe_server(url, info))
    run.server = _facts(info)
    session.results.runs.append(run)
    target = _Target(session, run, url, ServerLog(log) if log else None, None, info)
    try:
        for concurrency in missing:
            target.measure(concurrency)
    except KeyboardInterrupt:
        run.failure = "interrupted"
        raise
    finally:
        session.save()


def infer_label(info: Mapping[str, Any], log: Path | None) -> str | None:
    """The variant that a running server is, None if it speculates and there is no log: only the
    plugin's start line tells `threshold=N` from `on`."""
    if not info.get("speculative_algorithm"):
        return "off"
    if info.get("speculative_adaptive"):
        return "adaptive"
    if log is None:
        return None
    newest_boot = ServerLog(log).text().rpartition("server_args=")[2]
    active = re.search(r"\bN=(\d+)", read_boot(newest_boot).plugin_line or "")
    return f"threshold={active[1]}" if active else "on"


def _boot_and_measure(
    session: Session, variants: Sequence[Variant], boot: int, launch: Launch
) -> None:
    """Boots the servers together, then puts one after another under load while the others idle."""
    report, begun = session.reporter, []
    try:
        with ExitStack() as stack:
            servers = []
            for variant in variants:
                run, start = _prepare(session, variant, boot, launch)
                begun.append(run)
                try:
                    servers.append((variant, run, stack.enter_context(start)))
                except BootError as error:
                    _did_not_boot(session, run, str(error))
            report.begin(f"{', '.join(v.label for v, *_ in servers)}, boot {boot}: booting")
            failures = await_boots(
                [server for *_, server in servers], launch.boot_timeout_s, report.still_waiting
            )
            targets = []
            for place, (variant, run, server) in enumerate(servers):
                if place in failures:
                    _did_not_boot(session, run, failures[place])
                    continue
                info = server_info(server.url, session.api_key)
                _describe_boot(run, variant, server, info, alone=len(variants) == 1)
                run.server["gc_frozen"] = freeze_gc(server.url, session.api_key)
                if not run.server["gc_frozen"]:
                    run.notes.append(_GC_NOT_FROZEN)
                capture = "" if run.capture_gb is None else f", graphs {run.capture_gb:.2f} GB"
                report.say(f"{_name(session, run)}: up after {server.boot_s:.1f} s{capture}")
                for note in run.notes:
                    report.say(f"{_name(session, run)}: NOTE {note}")
                targets.append(_Target(session, run, server.url, server.log, server, info))
            for target, concurrency in _in_turns(session.results, targets):
                target.measure(concurrency)
    except KeyboardInterrupt:
        for run in begun:
            if session.results.missing_levels(run.variant, boot):
                run.failure = run.failure or "interrupted"
        raise
    finally:
        for run in begun:
            run.finished = run.finished or now()
        session.save()


def _prepare(
    session: Session, variant: Variant, boot: int, launch: Launch
) -> tuple[Run, AbstractContextManager[Server]]:
    """The record of a boot, already among the results, and what starts its server."""
    port = free_port()
    command = command_for(variant, launch.base, port)
    environment = environment_for(variant, launch.environ)
    log_path = _unused_log_path(launch.logs, variant.label, boot)
    run = Run(
        variant.label,
        boot,
        command=redacted(command),
        started=now(),
        environment=describe_machine(command, environment),
        log_file=f"{launch.logs.name}/{log_path.name}",
    )
    session.results.runs.append(run)
    return run, starting(command, environment, port, log_path)


def _name(session: Session, run: Run) -> str:
    return f"{run.variant}, boot {run.boot} of {session.results.plan.boots}"


def _did_not_boot(session: Session, run: Run, why: str) -> None:
    run.failure, run.finished = f"did not boot: {why}", now()
    session.reporter.say(f"{_name(session, run)}: FAILED, {run.failure}")


def _describe_boot(
    run: Run, variant: Variant, server: Server, info: dict[str, Any], alone: bool
) -> None:
    boot_log = read_boot(server.log.text())
    run.server = _facts(info)
    run.environment["sglang"] = info.get("version") or run.environment.get("sglang")
    assert server.boot_s is not None  # it is up
    run.boot_s = round(server.boot_s, 2)
    run.capture_s = boot_log.capture_s
    if alone:
        run.capture_gb, run.gpu_memory_used_mib = boot_log.capture_gb, gpu_memory_used_mib()
    else:
        run.notes.append("booted beside others: slower, and its share of GPU memory is not told")
    run.notes += boot_notes(variant, info, boot_log)


def boot_notes(variant: Variant, info: Mapping[str, Any], boot_log: BootLog) -> list[str]:
    """Signs that the server is not what its variant says it is."""
    notes = []
    algorithm = info.get("speculative_algorithm")
    if info and bool(algorithm) != variant.speculates:
        notes.append(f"the server reports speculative_algorithm={algorithm}")
    if variant.kind == "adaptive" and info and not info.get("speculative_adaptive"):
        notes.append("the server switched its adaptive mode off (its log says why)")
    line = boot_log.plugin_line
    if variant.kind == "threshold" and f"N={variant.threshold}," not in f"{line},":
        notes.append(
            f"the server never logged that the plugin is active with N={variant.threshold} "
            f"(found: {line})"
        )
    if variant.kind != "threshold" and line is not None:
        notes.append(f"the plugin is active though this variant does not ask for it: {line}")
    return notes


class _Target:
    """A server that is up, and the record of what is measured on it.

    Args:
        log: None for a running server whose log is not at hand.
        server: None for a server that somebody else runs.
        info: its /server_info.
    """

    def __init__(
        self,
        session: Session,
        run: Run,
        url: str,
        log: ServerLog | None,
        server: Server | None,
        info: dict[str, Any],
    ) -> None:
        self.run = run
        self._session, self._url, self._log, self._server = session, url, log, server
        self._prompts, self._cap = session.prompts_for(info), _admission_cap(info)

    def measure(self, concurrency: int) -> None:
        """Measure one level and save it; nothing if the server has died."""
        session, run = self._session, self.run
        if run.failure:
            return
        try:
            level = _measure_level(session, run, self._prompts, concurrency, self._url, self._log)
        except LoadError as error:
            run.failed_levels[str(concurrency)] = str(error)
            session.reporter.say(f"{run.variant}, C={concurrency}: FAILED, {error}")
            if self._server is not None and (death := self._server.death()):
                run.failure = death
                session.reporter.say(f"{run.variant}: the server died: {death}")
                return
        else:
            run.levels.append(replace(level, admission_cap=self._cap))
            session.reporter.say(f"{run.variant}, {describe_level(run.levels[-1])}")
        finally:
            run.finished = now()
            session.save()
        session.reporter.level_done()


def _in_turns(results: Results, targets: Sequence[_Target]) -> Iterator[tuple[_Target, int]]:
    """What to measure in which order: a level on each server that lacks it, then the next level,
    with another server first, as for the same level in the next round."""
    rounds, levels = results.plan.rounds, results.plan.concurrency
    missing = [
        Counter(results.missing_levels(target.run.variant, target.run.boot)) for target in targets
    ]
    for round_number, (turn, concurrency) in product(range(rounds), enumerate(levels)):
        for place in range(len(targets)):
            place = (place + turn + round_number) % len(targets)
            if missing[place][concurrency] >= rounds - round_number:
                yield targets[place], concurrency


def _measure_level(
    session: Session,
    run: Run,
    prompts: Prompts,
    concurrency: int,
    url: str,
    log: ServerLog | None,
) -> Level:
    load, label = session.load, run.variant
    times = len(levels_of([run], label, concurrency))
    client = Client(url, session.api_key, load.stream_interval, session.request_timeout_s)
    requests = load.requests_at(concurrency)
    report = session.reporter
    if load.warmup_tokens:
        # Compiles and loads what this batch size needs; lets an adaptive server settle.
        report.begin(f"{label}, C={concurrency}: warm-up", concurrency)
        warmup = prompts.for_level(concurrency, _seed(load, times) + concurrency)
        client.run(warmup, concurrency, load.warmup_tokens, report.advance)
    report.begin(f"{label}, C={concurrency}: {requests} requests", requests)
    chosen = prompts.for_level(requests, _seed(load, times) - concurrency)
    position = log.position() if log else 0
    traces = client.run(chosen, concurrency, load.output_tokens, report.advance)
    seen = read_level(log.text(position), concurrency) if log else LevelLog()
    client_side = client_figures(traces, concurrency)
    return Level(
        concurrency=concurrency,
        requests=client_side.requests,
        output_tokens=client_side.output_tokens,
        wall_s=client_side.wall_s,
        tok_s=client_side.tok_s,
        ttft_ms_p50=client_side.ttft_ms_p50,
        ttft_ms_p99=client_side.ttft_ms_p99,
        itl_ms_p50=client_side.itl_ms_p50,
        itl_ms_p99=client_side.itl_ms_p99,
        steady_s=client_side.steady_s,
        steady_tok_s=client_side.steady_tok_s,
        server_tok_s=seen.tok_s,
        server_tok_s_clean=seen.tok_s_clean,
        server_tok_s_lines=seen.tok_s_lines,
        # The log tells target-only steps apart; the client's figure cannot.
        accept_len=seen.accept_len if log else client_side.accept_len,
        graph_backend=seen.graph_backend,
        graph_share=seen.graph_share,
        running_max=seen.running_max,
        at_level_share=seen.at_level_share,
        queued=seen.queued,
        retractions=seen.retractions,
        switches=seen.switches,
        adaptive_switches=seen.adaptive_switches,
        notes=[seen.note] if seen.note else [],
    )


def _seed(load: Load, times: int) -> int:
    """Leaves the variant out: all variants answer the same prompts. But the server has those in its
    radix cache that it has answered in earlier rounds, ``times`` of them."""
    return (load.seed + 1000 * times) * 1_000_003


def describe_level(level: Level) -> str:
    """One line of progress, e.g. ``C=8: 1621 tok/s steady, server 1640, ITL 4.9 ms``."""
    parts = [f"C={level.concurrency}: {level.tok_s:.0f} tok/s end to end"]
    if level.steady_tok_s is not None:
        parts.append(f"{level.steady_tok_s:.0f} steady")
    if level.server_tok_s is not None:
        parts.append(f"server {level.server_tok_s:.0f}")
    if level.itl_ms_p50 is not None:
        parts.append(f"ITL p50 {level.itl_ms_p50:.2f} ms")
    if level.accept_len is not None:
        parts.append(f"accept {level.accept_len:.2f}")
    if level.graph_share is not None:
        parts.append(f"{level.graph_backend} graphs {level.graph_share:.0%}")
    if level.running_max is not None and level.running_max < level.concurrency:
        parts.append(f"only {level.running_max} running")
    return ", ".join(parts)


def _admission_cap(info: Mapping[str, Any]) -> int | None:
    """Most requests that the whole server runs at once, as it reports it."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    per_rank = state.get("effective_max_running_requests_per_dp")
    if isinstance(per_rank, int):
        return per_rank * int(info.get("dp_size") or 1)
    asked = info.get("max_running_requests")
    return asked if isinstance(asked, int) else None


def _facts(info: Mapping[str, Any]) -> dict[str, Any]:
    facts = {name: info[name] for name in _SERVER_FACTS if info.get(name) is not None}
    if (cap := _admission_cap(info)) is not None:
        facts["max_running_requests"] = cap
    return facts


def _unused_log_path(logs: Path, label: str, boot: int) -> Path:
    """A resumed sweep boots the same variant again: the log of the first attempt stays."""
    stem = f"{label.replace('=', '-')}-boot{boot}"
    taken = 1
    path = logs / f"{stem}.log"
    while path.exists():
        taken += 1
        path = logs / f"{stem}.{taken}.log"
    return path
