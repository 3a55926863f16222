"""The state of one server's boot, and the verdict on it.

Pure and synchronous: it is told what was seen and when, and never looks at a clock, a file or a
process itself. All times are seconds on one monotonic scale that the caller chooses.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from sglang_spec_ext.ops.wait.arguments import BootArguments, read_arguments
from sglang_spec_ext.ops.wait.failures import STOPPED_CODES, FailureBook, handled
from sglang_spec_ext.ops.wait.liveness import (
    BUDGETS,
    COMPILING,
    WITHOUT_PROCESS,
    Budget,
    Liveness,
    Vitals,
)
from sglang_spec_ext.ops.wait.masking import mask
from sglang_spec_ext.ops.wait.patterns import Kind, Phase, hint_for
from sglang_spec_ext.ops.wait.reader import Growth, Record

SETTLE = 1.5  # ranks fail within a second of each other and the first cause may be written last
REFUTE = 10.0  # how long a failure found in an old log may wait for a probe to refute it
STRANGER = 120.0  # after this, what answers is ours though the log never said so
LOG_OVER = 10.0  # after the end of a piped log, until nobody answering means nobody there
LAST_WORD = 30.0  # a traceback that nothing follows, where no process can be looked at


class Outcome(str, enum.Enum):
    READY = "ready"
    CRASHED = "crashed"
    HUNG = "hung"
    TIMED_OUT = "timed out"
    STOPPED = "stopped"  # somebody ended it: no readiness, but no defect either


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    phase: Phase
    reason: str
    rank: str = ""
    hint: str = ""
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Log lines quote command lines, and those hold keys.
        object.__setattr__(self, "reason", mask(self.reason))
        object.__setattr__(self, "evidence", tuple(mask(line) for line in self.evidence))


@dataclass
class Span:
    """One phase of this boot. ``ranks`` have finished it; ``done`` of ``total`` is its bar."""

    phase: Phase
    begin: float
    end: float | None = None
    ranks: set[str] = field(default_factory=set)
    done: int = 0
    total: int = 0

    def seconds(self, now: float) -> float:
        return max((now if self.end is None else self.end) - self.begin, 0.0)


class BootState:
    """What is known about the current boot. A restart in the same log begins a new one.

    ``patience`` multiplies the budgets after which a silent boot counts as hung.
    """

    def __init__(
        self, now: float, *, has_log: bool = True, wants_probe: bool = True, patience: float = 1.0
    ) -> None:
        self.has_log = has_log
        self.patience = patience
        self.boots = 0  # how many were seen in this log
        self._asked_for_probe = wants_probe
        self._since = now
        self._expected: dict[Phase, float] = {}
        self._vitals: Vitals | None = None
        self._gone_at: float | None = None
        self._lost_at: float | None = None
        self._log_over_at: float | None = None
        self._new_boot(now)

    def _new_boot(self, at: float) -> None:
        self.spans = [Span(Phase.LOG if self.has_log else Phase.BLIND, at)]
        self.arguments: BootArguments | None = None
        self.failures = FailureBook()
        self.liveness = Liveness(at)
        self.compiling = ""
        self.ready_line = False
        self.health = ""
        self.notes: dict[str, str] = {}
        self._answered_since: float | None = None
        self._healthy_since: float | None = None  # and it is this boot that answers
        self._token_came = False
        self._probe_error = ""
        self._loads: dict[str, int] = {}

    # --- what the caller reads ----------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.spans[-1].phase

    @property
    def begin(self) -> float:
        return self.spans[0].begin

    @property
    def rank_count(self) -> int:
        """Scheduler processes that this node should have; 0 while unknown."""
        return len(self.arguments.ranks) if self.arguments else 0

    @property
    def wants_first_token(self) -> bool:
        """Whether it is time to try a real generation."""
        return self._probes and self._healthy_since is not None and not self._token_came

    def missing_ranks(self, span: Span) -> list[str]:
        """Ranks that have not finished ``span``; empty where the log does not name ranks."""
        if self.arguments is None or self.rank_count < 2:
            return []
        return [rank for rank in self.arguments.ranks if rank not in span.ranks]

    def slow(self, now: float) -> str:
        """Why a long silence is no reason to worry; empty when there is no silence."""
        if self.compiling:
            return f"compiling kernels ({self.compiling}), can take many minutes the first time"
        span = self.spans[-1]
        expected = self._expected.get(span.phase)
        if expected is not None and span.seconds(now) > 1.5 * expected + 10:
            return self.liveness.why() or f"took {expected:.0f} s in earlier boots"
        return self.liveness.slow(now)

    def expect(self, seconds: dict[Phase, float]) -> None:
        """What the phases took in earlier boots; no budget ends below twice that."""
        self._expected = seconds

    def remaining(self, now: float) -> float | None:
        """Estimated seconds to the end; None without earlier boots."""
        if not self._expected:
            return None
        seen = {span.phase for span in self.spans}
        current = self.spans[-1]
        rest = max(self._expected.get(current.phase, 0.0) - current.seconds(now), 0.0)
        return rest + sum(each for phase, each in self._expected.items() if phase not in seen)

    def durations(self, now: float) -> dict[Phase, float]:
        """Seconds that each phase took, for the record."""
        return {span.phase: span.seconds(now) for span in self.spans if span.phase != Phase.LOG}

    # --- what the caller tells ----------------------------------------------------------------

    def on_records(self, records: list[Record], at: float, *, old: bool = False) -> None:
        """Records of the log; ``old`` when they were there before we came."""
        for record in records:
            self._on_record(record, at, old)

    def on_growth(self, growth: Growth, at: float) -> None:
        """The log has grown. Batches count only where requests should be running."""
        if self.phase is Phase.LOG and growth.news:
            self._enter(Phase.ARGUMENTS, at)
        serving = self.phase in (Phase.WARM_UP, Phase.FIRST_TOKEN)
        if growth.news or (growth.batches and serving):
            self.liveness.moved(at)

    def on_log_end(self, at: float) -> None:
        """A piped log has ended: `docker logs -f` does so when its container stops."""
        self._log_over_at = at

    def on_vitals(self, vitals: Vitals, at: float) -> None:
        """A look at the processes."""
        first, self._vitals = self._vitals is None, vitals
        if first and vitals.started_at is not None:
            self._forget_earlier_boot(vitals.started_at)
        if not vitals.alive:
            self._gone_at = at if self._gone_at is None else self._gone_at
        elif vitals.lost:
            self._lost_at = at if self._lost_at is None else self._lost_at
        self.liveness.look(vitals, at)

    def on_health(self, answer: str, at: float) -> None:
        """``ok``, ``starting`` (503), ``refused``, ``slow`` or the words of another failure."""
        self.health = answer
        if answer != "ok":
            self._healthy_since = self._answered_since = None
            return
        self._answered_since = at if self._answered_since is None else self._answered_since
        if self._is_stranger(at):
            self.notes["stranger"] = (
                "something answers at this address though this boot has not opened its port yet: "
                "another server there would take it away"
            )
            return
        self.notes.pop("stranger", None)
        self._healthy_since = at if self._healthy_since is None else self._healthy_since
        if self.ready_line or not self._ready_line_expected:
            self._enter(Phase.FIRST_TOKEN, at)

    def on_probe(self, error: str, at: float) -> None:
        """The end of a real generation; an empty ``error`` means that tokens came back."""
        self._probe_error = error
        if error:
            return
        self._token_came = True
        self._enter(Phase.FIRST_TOKEN, at)
        if self._only_old_failures:
            self.failures = FailureBook()
            self.notes["earlier failure"] = (
                "the log told of a failure, but the server answers: that was an earlier boot"
            )

    # --- the verdict --------------------------------------------------------------------------

    def verdict(self, now: float, last_lines: tuple[str, ...] = ()) -> Verdict | None:
        """The end of the waiting, or None.

        Failure comes before readiness: a server whose scheduler has died may answer health checks
        for an hour.
        """
        return self._failed(now, last_lines) or self._ready(now) or self._hung(now, last_lines)

    def timed_out(self, now: float, last_lines: tuple[str, ...] = ()) -> Verdict:
        """The verdict when the caller's time is over, with what was still missing."""
        span = self.spans[-1]
        reason = f"still in phase '{span.phase.value}', {span.seconds(now):.0f} s into it"
        missing = self.missing_ranks(span)
        if span.ranks and missing:
            reason += f"; not through yet: {', '.join(missing)}"
        if self.health:
            reason += f"; health: {self.health}"
        if self._probe_error:
            reason += f"; one-token request: {self._probe_error}"
        if self.slow(now):
            reason += f"; {self.slow(now)}"
        return Verdict(Outcome.TIMED_OUT, span.phase, reason, evidence=last_lines)

    def _ready(self, now: float) -> Verdict | None:
        if self._healthy_since is None or self.failures.reports:
            return None
        if self._probes:
            if not self._token_came:
                return None
            how = "a generated token came back"
            if self.arguments and self.arguments.dp_ranks > 1:
                how += f" from each of {self.arguments.dp_ranks} DP ranks"
        elif self._other_node:
            how = "this node's ranks are loaded; requests go to node 0"
        elif self.ready_line:
            how = "health answers and the log says ready; no token was asked for"
        elif not self._ready_line_expected or now - self._healthy_since > REFUTE:
            how = "health answers; no token was asked for and no ready line is needed"
        else:
            return None
        return Verdict(Outcome.READY, self.phase, how)

    def _failed(self, now: float, last_lines: tuple[str, ...]) -> Verdict | None:
        gone = self._gone_at is not None and now - self._gone_at >= SETTLE
        gone = gone or self._log_is_over(now)
        lost = self._lost_at is not None and now - self._lost_at >= SETTLE
        told = [each for each in self.failures.reports if now - each.at >= SETTLE]
        if gone or lost:
            pass
        elif told:
            if self._only_old_failures and self._may_be_refuted(now):
                return None
        elif not self._last_word(now):
            return None
        first = self.failures.first_cause()
        if first is None:
            return self._without_a_word(last_lines)
        hint = self.failures.hint(first)
        if self._vitals is not None and self._vitals.oom_kills:
            hint = hint_for("exit code -9")
        outcome = Outcome.CRASHED
        if first.hung:
            outcome = Outcome.HUNG
        elif first.stopped:
            outcome = Outcome.STOPPED
        block = tuple(line for line in first.block.split("\n") if line.strip())[-8:]
        return Verdict(outcome, self.phase, first.reason, first.rank, hint, block or last_lines)

    def _log_is_over(self, now: float) -> bool:
        """Whether the end of a piped log is all that will be heard of the server."""
        if self._log_over_at is None or self.health != "refused":
            return False
        return self._vitals is None and now - self._log_over_at >= LOG_OVER

    def _may_be_refuted(self, now: float) -> bool:
        """An old failure in the log may be an earlier boot's, and the server well."""
        if not self._probes or self._probe_error:
            return False
        if self.health == "refused" and self._vitals is None:
            return False
        return now - self._since < REFUTE

    def _last_word(self, now: float) -> bool:
        """Whether the log ends with an unhandled exception, where no process can be asked."""
        if self._vitals is not None or not self.failures.tracebacks or self.health == "ok":
            return False
        at = self.failures.tracebacks[-1].at
        return now - at > LAST_WORD and self.liveness.moved_at <= at

    def _without_a_word(self, last_lines: tuple[str, ...]) -> Verdict:
        vitals = self._vitals
        outcome, rank, hint = Outcome.CRASHED, "", ""
        if vitals is None:
            reason = "the log has ended, nobody answers, and the log does not say why"
            if "stop" in self.notes:
                outcome, hint = Outcome.STOPPED, hint_for("exit code -15")
            return Verdict(outcome, self.phase, reason, rank, hint, last_lines)
        if not vitals.alive:
            code = vitals.exit_code
            told = f" (exit code {code})" if code is not None else ""
            reason = f"the server process is gone{told} and the log does not say why"
            hint = hint_for(f"exit code {code}")
            if code in STOPPED_CODES or "stop" in self.notes:
                outcome, hint = Outcome.STOPPED, hint_for("exit code -15")
        else:
            rank = vitals.lost[0]
            reason = f"scheduler process {', '.join(vitals.lost)} is gone, the launcher still runs"
            hint = hint_for("exit code -9")
        if vitals.oom_kills:
            reason += f"; the kernel's OOM killer struck {vitals.oom_kills} times since the start"
            hint = hint_for("exit code -9")
        return Verdict(outcome, self.phase, reason, rank, hint, last_lines)

    def _hung(self, now: float, last_lines: tuple[str, ...]) -> Verdict | None:
        span = self.spans[-1]
        if span.phase is Phase.BLIND and self._vitals is None:
            return None  # nothing is known but the health check: only the timeout can end this
        hung, silent_for, busy = self.liveness.overdue(now, self._budget(span.phase))
        if not hung:
            return None
        rank = ""
        hint = "see where it stands: `py-spy dump --pid <pid>` of each sglang::scheduler process"
        reason = f"nothing has moved in phase '{span.phase.value}' for {silent_for:.0f} s"
        reason += ", though the CPU is busy" if busy else ""
        missing = self.missing_ranks(span)
        if span.phase is Phase.LOG:
            reason = f"nothing was written to the log for {silent_for:.0f} s"
            hint = "is it the right file, and does the server write to it?"
        elif span.phase is Phase.FIRST_TOKEN:
            reason += f"; health: {self.health or 'not asked'}, "
            reason += f"one-token request: {self._probe_error or 'no answer'}"
        elif span.ranks and missing:
            rank = missing[0]
            done = self.rank_count - len(missing)
            reason += f"; {done} of {self.rank_count} ranks are through, not {', '.join(missing)}"
            hint = (
                "look at the processes of these ranks: killed (`dmesg -T | grep -i oom`, the "
                "container's memory limit), or waiting for a slow disk?"
            )
        return Verdict(Outcome.HUNG, span.phase, reason, rank, hint, last_lines)

    def _budget(self, phase: Phase) -> Budget:
        budget = COMPILING if self.compiling else BUDGETS[phase]
        least = 2 * self._expected.get(phase, 0.0)
        silent = budget.silent
        if self._vitals is None and phase is not Phase.FIRST_TOKEN:
            silent *= WITHOUT_PROCESS
        return Budget(max(silent, least) * self.patience, max(budget.busy, least) * self.patience)

    # --- what it rests on ---------------------------------------------------------------------

    @property
    def _other_node(self) -> bool:
        """Nodes but the first answer health checks with a dummy and take no requests."""
        return self.arguments is not None and self.arguments.node_rank > 0

    @property
    def _probes(self) -> bool:
        return self._asked_for_probe and not self._other_node

    @property
    def _ready_line_expected(self) -> bool:
        """Whether the log tells about this boot, so that its ready line should come."""
        return self.arguments is not None and not self._other_node

    @property
    def _only_old_failures(self) -> bool:
        """Whether all that is known against this boot was in the log before we came."""
        reports = self.failures.reports
        return bool(reports) and all(failure.old for failure in reports)

    def _is_stranger(self, now: float) -> bool:
        """Whether the answer must come from another server on the same port."""
        if self.arguments is None or self._other_node or self._only_old_failures:
            return False
        opened = (Phase.HTTP, Phase.WARM_UP, Phase.FIRST_TOKEN)
        since = now if self._answered_since is None else self._answered_since
        return self.phase not in opened and now - since < STRANGER

    def _on_record(self, record: Record, at: float, old: bool) -> None:
        kind, phase = record.pattern.kind, record.pattern.phase
        if kind in (Kind.BOOT, Kind.ARGS):
            self._on_start(record, at)
        elif kind is Kind.BEGIN and phase is not None:
            self._on_begin(record, phase, at)
        elif kind is Kind.END and phase is not None:
            self._on_end(record, phase, at)
        elif kind is Kind.BAR:
            self._on_bar(record, at)
        elif kind is Kind.COMPILE:
            self.compiling = record.match["what"]
            self.liveness.moved(at)
        elif kind is Kind.COMPILED:
            self.compiling = ""
        elif kind is Kind.PREFETCH:
            self.liveness.excuse("weights are being read into the page cache")
        elif kind is Kind.READY:
            self.ready_line = True
            self.compiling = ""
            self._enter(Phase.FIRST_TOKEN, at)
        elif kind is Kind.SYMPTOM:
            self.notes[record.pattern.anchor.decode()] = record.message
        elif kind is Kind.NOTE or handled(record):
            self._note(record)
        elif kind is Kind.HUNG and record.match.groupdict().get("soft") == "True":
            self.notes["soft watchdog"] = record.message
        else:
            self.failures.add(record, at, old)

    def _on_start(self, record: Record, at: float) -> None:
        """The first lines of a boot: the launcher's warning, then the arguments once or twice."""
        if record.rank:
            return
        warned_late = record.pattern.kind is Kind.BOOT and self.arguments is not None
        moved_on = len(self.spans) > 2
        if warned_late or moved_on or self.failures.reports:
            self._new_boot(at)
        self._enter(Phase.ARGUMENTS, at)
        if record.pattern.kind is Kind.ARGS:
            self.boots += self.arguments is None
            self.arguments = read_arguments(record.message)

    def _on_begin(self, record: Record, phase: Phase, at: float) -> None:
        self.compiling = ""
        if phase is Phase.TARGET_WEIGHTS:
            self._loads[record.rank] = self._loads.get(record.rank, 0) + 1
        self._enter(self._whose(phase, record), at)

    def _on_end(self, record: Record, phase: Phase, at: float) -> None:
        self.compiling = ""
        phase = self._whose(phase, record)
        for span in self.spans:
            if span.phase is phase:
                span.ranks.add(record.rank)
        self.liveness.moved(at)

    def _whose(self, phase: Phase, record: Record) -> Phase:
        """Tell the draft's weights and memory pool, whose lines read like the target's."""
        if phase is Phase.TARGET_WEIGHTS and self._loads.get(record.rank, 0) > 1:
            return Phase.DRAFT_WEIGHTS
        if phase is Phase.POOL:
            seen = [span.phase for span in self.spans]
            if (
                Phase.DRAFT_WEIGHTS in seen
                and Phase.POOL in seen[: seen.index(Phase.DRAFT_WEIGHTS)]
            ):
                return Phase.DRAFT_POOL
        return phase

    def _on_bar(self, record: Record, at: float) -> None:
        span = self.spans[-1]
        weights = (Phase.TARGET_WEIGHTS, Phase.DRAFT_WEIGHTS)
        graphs = (Phase.GRAPHS, Phase.DRAFT_GRAPHS)
        if span.phase not in (weights if record.pattern.phase in weights else graphs):
            return
        done, total = int(record.match["done"]), int(record.match["total"])
        if total != span.total:
            span.done, span.total = 0, total  # the next set of graphs in the same phase
        if done > span.done:
            span.done = done
            self.compiling = ""
            self.liveness.moved(at)

    def _note(self, record: Record) -> None:
        """The first line that says it, and the exception where one follows."""
        key = "stop" if record.message.startswith("Gracefully") else record.message
        if record.exceptions:
            self.notes[key] = f"{record.message}: {record.exceptions[-1]}"
        else:
            self.notes.setdefault(key, record.message)

    def _enter(self, phase: Phase, at: float) -> None:
        """Begin a phase; one that this boot has already seen changes nothing."""
        if any(span.phase is phase for span in self.spans):
            return
        for span in self.spans:  # a log that we read late tells of times before we came
            span.begin = min(span.begin, at)
        self.spans[-1].end = at
        self.spans.append(Span(phase, at))
        self.failures.progress()
        self.liveness.next_phase()
        self.liveness.moved(at)

    def _forget_earlier_boot(self, started_at: float) -> None:
        """What the log told about a boot before this process is not about this process."""
        reports = self.failures.reports
        if reports and max(failure.at for failure in reports) < started_at - 1:
            self._new_boot(started_at)
        self.spans[0].begin = min(self.begin, started_at)
