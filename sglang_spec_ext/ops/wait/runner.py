"""The thin part that touches the world: reads the log, looks at processes, asks over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from sglang_spec_ext.ops.wait.arguments import BootArguments
from sglang_spec_ext.ops.wait.boot import BootState, Outcome, Verdict
from sglang_spec_ext.ops.wait.follow import LogFile, LogPipe
from sglang_spec_ext.ops.wait.history import BootHistory
from sglang_spec_ext.ops.wait.patterns import Phase
from sglang_spec_ext.ops.wait.probe import ServerProbe
from sglang_spec_ext.ops.wait.reader import LogReader, Record
from sglang_spec_ext.ops.wait.vitals import ProcessWatch
from sglang_spec_ext.ops.wait.wakeup import Wakeup

TICK = 1.0  # seconds; the longest sleep, since clocks and budgets report no events
BREATH = 0.1  # the shortest one: a chatty log must not make us chatty
QUIET = 0.5  # after this a record that waits for more lines is complete
LOOK_EVERY = 2.0  # a walk over the process tree
ASK_EVERY = 2.0  # health checks while the server should answer
ASK_EVERY_EARLY = 10.0  # and before the log says so
ASK_GPU_AFTER = 30.0  # of silence
CATCHING_UP = 1 << 16  # bytes at once: a pipe still tells the past


class _Question:
    """A request in the background. A daemon thread, so that one that hangs holds nobody up."""

    def __init__(self, ask: Callable[[], str], about_token: bool, ring: Callable[[], None]) -> None:
        self.about_token = about_token
        self.answer: str | None = None
        self._ask = ask
        self._ring = ring
        threading.Thread(target=self._run, name="probe", daemon=True).start()

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except Exception as error:  # an answer of a shape that nobody expects is an answer too
            self.answer = f"failed ({type(error).__name__}: {error})"
        self._ring()


class Waiter:
    """Feeds a `BootState` until it has a verdict."""

    def __init__(
        self,
        boot: BootState,
        probe: ServerProbe,
        *,
        log: LogFile | LogPipe | None,
        processes: ProcessWatch | None,
        history: BootHistory,
        started: float,
    ) -> None:
        self.boot = boot
        self._probe = probe
        self._log = log
        self._processes = processes
        self._history = history
        self._reader = LogReader()
        self._started = started
        self._grew_at = started
        self._looked_at = -1e9
        self._asked_at = -1e9
        self._question: _Question | None = None
        self._caught_up = not isinstance(log, LogPipe)
        self._known_key = ""

    def wait(self, timeout: float | None, show: Callable[[float], None]) -> Verdict:
        """Block until the verdict; ``show`` is called after every look. Times in seconds."""
        with Wakeup() as wakeup:
            if isinstance(self._log, LogFile):
                wakeup.on_file(self._log.path)
            elif self._log is not None:
                wakeup.on_descriptor(self._log.descriptor)
            try:
                self._read_log(time.monotonic(), first=True)
                while True:
                    now = time.monotonic()
                    verdict = self._step(now, wakeup)
                    show(now)
                    if verdict is None and timeout is not None and now - self._started > timeout:
                        verdict = self.boot.timed_out(now, self._last_lines())
                    if verdict is not None:
                        self._remember(verdict, now)
                        return verdict
                    if wakeup.sleep(TICK):
                        self._looked_at = -1e9
                    time.sleep(BREATH)
            finally:
                if self._log is not None:
                    self._log.close()

    def _step(self, now: float, wakeup: Wakeup) -> Verdict | None:
        self._read_log(now)
        if isinstance(self._log, LogPipe) and self._log.closed:
            wakeup.forget_descriptor(self._log.descriptor)
            self._log = None
            self.boot.on_records(self._reader.finish(), now)
            self.boot.on_log_end(now)
        self._look(now, wakeup)
        self._take_answer(now)
        self._ask(now, wakeup)
        self._expect()
        return self.boot.verdict(now, self._last_lines()) if self._caught_up else None

    def _read_log(self, now: float, *, first: bool = False) -> None:
        """Everything new; on the first look the log's own times tell when it happened."""
        if self._log is None:
            return
        written = now - self._log.age() if first else now
        records: list[Record] = []
        size = 0
        for piece in self._log.read_new():
            records += self._reader.feed(piece)
            size += len(piece)
        if size:
            self._grew_at = now
        if first or now - self._grew_at > QUIET:
            records += self._reader.settle()
        for record, at in zip(records, _times(records, written, first), strict=True):
            self.boot.on_records([record], at, old=first or not self._caught_up)
        self.boot.on_growth(self._reader.take_growth(), written)
        # `docker logs -f` tells the whole past first, and a failure in it may be long over.
        self._caught_up |= not first and size < CATCHING_UP

    def _look(self, now: float, wakeup: Wakeup) -> None:
        if self._processes is None or now - self._looked_at < LOOK_EVERY:
            return
        self._looked_at = now
        silent = now - self.boot.liveness.moved_at > ASK_GPU_AFTER
        vitals = self._processes.look(now, ask_gpu=silent)
        if not vitals.alive:
            self.boot.on_records(self._reader.finish(), now)
        self.boot.on_vitals(vitals, now)
        for pid in (self._processes.pid, *self._processes.scheduler_pids):
            wakeup.on_end_of(pid)

    def _take_answer(self, now: float) -> None:
        if self._question is None or self._question.answer is None:
            return
        question, self._question = self._question, None
        answer = question.answer or ""
        if question.about_token:
            self.boot.on_probe(answer, now)
        else:
            self.boot.on_health(answer, now)

    def _ask(self, now: float, wakeup: Wakeup) -> None:
        if self._question is not None:
            return
        served = (Phase.WARM_UP, Phase.FIRST_TOKEN, Phase.BLIND)
        pause = ASK_EVERY if self.boot.phase in served else ASK_EVERY_EARLY
        token = self.boot.wants_first_token
        if not token and now - self._asked_at < pause:
            return
        self._asked_at = now
        arguments = self.boot.arguments or BootArguments()
        split = arguments.disaggregation_mode != "null"
        token_ask = partial(self._probe.first_token, arguments.dp_ranks, split)
        self._question = _Question(token_ask if token else self._probe.health, token, wakeup.ring)

    def _expect(self) -> None:
        arguments = self.boot.arguments
        if arguments is not None and arguments.key != self._known_key:
            self._known_key = arguments.key
            self.boot.expect(self._history.expected(arguments.key))

    def _remember(self, verdict: Verdict, now: float) -> None:
        """Only an end that we have watched can teach how long a boot takes."""
        watched = self.boot.spans[-1].begin >= self._started
        if verdict.outcome is Outcome.READY and self.boot.arguments is not None and watched:
            self._history.add(self.boot.arguments.key, self.boot.durations(now))

    def _last_lines(self) -> tuple[str, ...]:
        return tuple(self._reader.last_lines())


def _times(records: list[Record], written: float, past: bool) -> list[float]:
    """When each record was written, on our clock.

    What is new was written now. The past is placed by the log's own times: the last one is the
    time of the last write, and a line without a time belongs to the one before it.
    """
    stamps = [record.stamp for record in records if record.stamp is not None]
    if not past or not stamps:
        return [written] * len(records)
    times, current, last = [], stamps[0], max(stamps)
    for record in records:
        current = record.stamp if record.stamp is not None else current
        times.append(written - (last - current))
    return times
