"""The result file: what was planned, what ran, what was measured. Written after every level.

JSON, ``{"schema": "sglang-spec-ext-bench", "schema_version": 1, "plan": Plan, "runs": [Run, ...]}``
with the dataclasses below as objects. One Run is one boot of one variant, with each level once for
every round, and the spread of a figure is its spread over all of them. Readers ignore keys that
they do not know; a change that would mislead them raises ``schema_version``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

SCHEMA = "sglang-spec-ext-bench"
SCHEMA_VERSION = 1

_T = TypeVar("_T")


class ResultsError(ValueError):
    """A result file cannot be read or does not fit; the message names the file and the fix."""


@dataclass(frozen=True)
class Load:
    """What every request and level looks like. Results compare only under the same load.

    prompts: in words, e.g. "random ids, 128 tokens". output_tokens: per request, fixed.
    requests_per_level: None means 3 per concurrent request, at least 8; never below 2.
    stream_interval: output tokens per streamed chunk.
    """

    prompts: str
    output_tokens: int
    requests_per_level: int | None
    warmup_tokens: int
    stream_interval: int
    seed: int

    def requests_at(self, concurrency: int) -> int:
        wanted = (
            max(8, 3 * concurrency)
            if self.requests_per_level is None
            else (self.requests_per_level)
        )
        return max(wanted, 2 * concurrency)


@dataclass
class Plan:
    """variants are labels; base_command is None when one running server was measured.

    rounds: how often each boot walks all levels.
    """

    variants: list[str]
    boots: int
    concurrency: list[int]
    load: Load
    base_command: list[str] | None = None
    rounds: int = 1


@dataclass(frozen=True)
class Level:
    """One concurrency level of one run. Throughput in output tokens/s, latency in milliseconds.

    tok_s: end to end. steady_tok_s: while C requests were in flight. server_tok_s: the server's own
    decode throughput at C running requests; server_tok_s_clean says that no prefill is in it.
    Server-side figures are None without a log.
    """

    concurrency: int
    requests: int
    output_tokens: int
    wall_s: float
    tok_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float | None = None
    itl_ms_p99: float | None = None
    steady_s: float | None = None
    steady_tok_s: float | None = None
    server_tok_s: float | None = None
    server_tok_s_clean: bool = False
    server_tok_s_lines: int = 0
    accept_len: float | None = None
    graph_backend: str | None = None
    graph_share: float | None = None
    running_max: int | None = None
    at_level_share: float | None = None
    queued: int | None = None
    admission_cap: int | None = None
    retractions: int = 0
    switches: int = 0
    adaptive_switches: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class Run:
    """One boot of one variant (or one sweep of a server that was already running).

    boot: 1 for the first boot. server: effective settings as the server reports them.
    environment: versions, GPUs, SGLANG_* variables. failure: why it could not boot or died, None
    if it lived. failed_levels: concurrency (as text) -> why that level has no figures.
    """

    variant: str
    boot: int
    command: list[str] | None
    started: str
    environment: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    boot_s: float | None = None
    capture_s: float | None = None
    capture_gb: float | None = None
    gpu_memory_used_mib: list[int] | None = None
    log_file: str | None = None
    finished: str | None = None
    failure: str | None = None
    notes: list[str] = field(default_factory=list)
    failed_levels: dict[str, str] = field(default_factory=dict)
    levels: list[Level] = field(default_factory=list)


@dataclass
class Results:
    plan: Plan
    runs: list[Run] = field(default_factory=list)

    def missing_levels(self, variant: str, boot: int) -> list[int]:
        """Levels of the plan that this variant and boot still lacks, once for each such round."""
        measured = Counter(
            level.concurrency
            for run in self.runs
            if run.variant == variant and run.boot == boot
            for level in run.levels
        )
        rounds = range(self.plan.rounds)
        return [c for done in rounds for c in self.plan.concurrency if measured[c] <= done]

    def save(self, path: Path) -> None:
        """Replaces ``path`` in one step: a reader, or a crash, never sees half a file."""
        document = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.write("\n")
            os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide it from whoever collects it
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def load_results(path: Path) -> Results:
    """Raises ResultsError if the file is missing, not ours, or of a newer schema."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ResultsError(
            f'{path} is no bench result (no "schema": "{SCHEMA}"); give the bench.json of a run'
        )
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ResultsError(
            f"{path} has schema version {document.get('schema_version')}, this version reads "
            f"{SCHEMA_VERSION}; use the release of sglang-spec-ext that wrote it"
        )
    try:
        plan = _build(Plan, document["plan"])
        plan.load = _build(Load, document["plan"]["load"])
        return Results(plan, [_build_run(run) for run in document["runs"]])
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{path} lacks a field: {error}") from error


def merge(parts: Sequence[Results]) -> tuple[Results, list[str]]:
    """Several files as one, with a warning for every way in which they do not compare."""
    first = parts[0].plan
    warnings = []
    for part in parts[1:]:
        differing = [
            name
            for name, value in asdict(first.load).items()
            if asdict(part.plan.load)[name] != value
        ]
        if differing:
            warnings.append(
                f"the files were measured under different loads: {', '.join(differing)}"
            )
    runs = [run for part in parts for run in part.runs]
    warnings += environment_warnings(runs)
    plan = Plan(
        variants=_unique(label for part in parts for label in part.plan.variants),
        boots=sum(part.plan.boots for part in parts),
        concurrency=sorted({c for part in parts for c in part.plan.concurrency}),
        load=first.load,
        base_command=first.base_command,
        rounds=max(part.plan.rounds for part in parts),
    )
    return Results(plan, runs), _unique(warnings)


def environment_warnings(runs: Sequence[Run]) -> list[str]:
    """Runs on different GPUs or releases do not compare: one warning per difference."""
    warnings = []
    for what in ("gpus", "sglang", "torch"):
        seen = {json.dumps(run.environment.get(what)) for run in runs if run.levels}
        if len(seen) > 1:
            warnings.append(f"runs differ in {what}: {', '.join(sorted(seen))}")
    if len({bool(run.server.get("gc_frozen")) for run in runs if run.levels}) > 1:
        warnings.append(
            "garbage collection was frozen in some servers only: end-to-end figures do not compare"
        )
    return warnings


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _build(kind: type[_T], values: Mapping[str, Any]) -> _T:
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in known})


def _build_run(values: Mapping[str, Any]) -> Run:
    run = _build(Run, values)
    run.levels = [_build(Level, level) for level in values.get("levels", [])]
    return run


def _unique(items: Any) -> list[Any]:
    return list(dict.fromkeys(items))
