"""Verdicts in fake time: every kind of end, each with a clean twin that raises no alarm."""

from __future__ import annotations

import pytest
from wait_logs import (
    CLOSED,
    FLOOD,
    HANDLED,
    NCCL,
    NINJA,
    READY,
    SIGQUIT,
    UNRECOGNIZED,
    USER_WARNING,
    WATCHDOG,
    LogWriter,
    boot_new,
    boot_old,
    new_args,
    old_args,
    until,
)
from wait_replay import Replay, healthy_after

from sglang_spec_ext.ops.wait.boot import BootState, Outcome
from sglang_spec_ext.ops.wait.liveness import Vitals
from sglang_spec_ext.ops.wait.patterns import Phase

OLD_ORDER = [
    "arguments",
    "distributed init",
    "target weights",
    "memory pool",
    "graph capture",
    "draft weights",
    "draft memory pool",
    "draft graph capture",
    "HTTP start",
    "warm-up",
    "first token",
]
NEW_ORDER = [
    "arguments",
    "distributed init",
    "target weights",
    "draft weights",
    "memory pool",
    "graph capture",
    "draft graph capture",
    "HTTP start",
    "warm-up",
    "first token",
]


def alive(now: float) -> Vitals:
    return Vitals(alive=True, cpu_seconds=now)


# --- ready --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "order"),
    [(boot_old(1), OLD_ORDER), (boot_old(8), OLD_ORDER), (boot_new(8), NEW_ORDER)],
    ids=["0.5.9-0.5.13", "0.5.9-0.5.13 TP8", "0.5.21-0.5.23 TP8"],
)
def test_a_whole_boot_goes_through_its_phases_once_and_is_ready(
    log: LogWriter, order: list[str]
) -> None:
    replay = Replay(vitals=alive, health=healthy_after(log.second))
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None and verdict.outcome is Outcome.READY
    assert replay.phases == order
    assert replay.boot.notes == {}


def test_ranks_and_bars_are_counted() -> None:
    log = until(boot_old(8), "Load weight end.")
    boot = BootState(0.0)
    Replay(boot).run(log.lines)
    span = boot.spans[-1]
    assert span.phase is Phase.TARGET_WEIGHTS
    assert (len(span.ranks), boot.rank_count, span.done, span.total) == (1, 8, 4, 4)
    assert boot.missing_ranks(span) == [f"TP{n}" for n in range(1, 8)]


def test_healthy_without_a_token_is_not_ready() -> None:
    log = boot_new()
    replay = Replay(health=healthy_after(0), token_error=lambda _: "no answer within 60 s")
    assert replay.run(log.lines, then=60) is None


def test_a_missing_ready_line_does_not_matter_once_a_token_came() -> None:
    """Log levels and failed warm-ups swallow it."""
    log = until(boot_new(), READY, also=False)
    replay = Replay(health=healthy_after(log.second))
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None and verdict.outcome is Outcome.READY


def test_without_a_probe_the_ready_line_is_awaited() -> None:
    log = until(boot_new(), READY, also=False)
    replay = Replay(BootState(0.0, wants_probe=False), health=healthy_after(log.second - 2))
    assert replay.run(log.lines, then=1) is None
    stamp = LogWriter().say(READY).lines
    assert replay.run(stamp, then=2).outcome is Outcome.READY  # type: ignore[union-attr]


def test_without_a_probe_a_lasting_health_replaces_the_ready_line() -> None:
    log = until(boot_new(), READY, also=False)
    replay = Replay(BootState(0.0, wants_probe=False), health=healthy_after(log.second))
    verdict = replay.run(log.lines, then=30)
    assert verdict is not None and verdict.outcome is Outcome.READY


def test_no_log_at_all_needs_health_and_a_token() -> None:
    replay = Replay(BootState(0.0, has_log=False), health=healthy_after(500))
    verdict = replay.run([], then=1000)
    assert verdict is not None and verdict.outcome is Outcome.READY
    assert replay.now == pytest.approx(500)


def test_other_nodes_are_ready_with_their_dummy_health_check() -> None:
    log = LogWriter(8)
    log.say(old_args(16, nnodes=2, node_rank=1)).tick(5).say("Init torch distributed begin.", 8)
    replay = Replay(health=healthy_after(20), token_error=lambda _: "HTTP 404")
    verdict = replay.run(log.lines, then=60)
    assert verdict is not None and verdict.outcome is Outcome.READY
    assert "node 0" in verdict.reason
    assert replay.boot.arguments is not None
    assert replay.boot.arguments.ranks[0] == "TP8"


@pytest.mark.parametrize(
    ("line", "ranks", "dp"),
    [
        (old_args(8), [f"TP{n}" for n in range(8)], 1),
        (old_args(1), [""], 1),
        (old_args(2, dp_size=2), ["DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1"], 2),
        (
            old_args(4, dp_size=2, enable_dp_attention=True),
            ["DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3"],
            2,
        ),
        (
            new_args(4, attn_dp_size=4, enable_dp_attention=True),
            ["DP0 TP0", "DP1 TP1", "DP2 TP2", "DP3 TP3"],
            4,
        ),
        (old_args(2, pp_size=2), ["PP0 TP0", "PP0 TP1", "PP1 TP0", "PP1 TP1"], 1),
    ],
)
def test_the_arguments_tell_which_ranks_to_expect(line: str, ranks: list[str], dp: int) -> None:
    boot = BootState(0.0)
    Replay(boot).run(LogWriter().say(line).lines)
    assert boot.arguments is not None
    assert list(boot.arguments.ranks) == ranks
    assert boot.arguments.dp_ranks == dp


def test_another_server_on_the_same_port_is_not_ours() -> None:
    log = until(boot_new(2), "Memory pool end")
    replay = Replay(health=lambda now: "ok" if now > 20 else "refused")
    assert replay.run(log.lines, then=5) is None
    assert "another server" in replay.boot.notes["stranger"]


# --- crashed ------------------------------------------------------------------------------------


def crash(log: LogWriter, then: float = 5, **more: object) -> Replay:
    replay = Replay(**more)  # type: ignore[arg-type]
    replay.verdict = replay.run(log.lines, then=then)  # type: ignore[attr-defined]
    return replay


def test_the_first_cause_of_the_first_failing_rank_is_told_not_the_last_line() -> None:
    log = until(boot_old(4), "Capture cuda graph begin")
    log.tick(3).say(NINJA, 3)
    for rank in (0, 1, 2):
        log.say(CLOSED, rank)
    for _ in range(300):
        log.raw(FLOOD)
    log.say(SIGQUIT)
    replay = Replay()
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None
    assert verdict.outcome is Outcome.CRASHED
    assert verdict.rank == "TP3"
    assert verdict.reason == "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"
    assert "pip install ninja" in verdict.hint
    assert verdict.phase is Phase.GRAPHS
    assert replay.now - log.second < 3, "seconds, not the next poll"


def test_an_echo_that_is_written_first_does_not_hide_the_cause() -> None:
    log = until(boot_old(4), "Load weight begin")
    log.say(CLOSED, 0).say(CLOSED, 1).say(NINJA, 3).say(SIGQUIT)
    verdict = Replay().run(log.lines, then=10)
    assert verdict is not None
    assert (verdict.rank, verdict.reason[:17]) == ("TP3", "FileNotFoundError")


def test_the_older_of_two_causes_is_the_first_one() -> None:
    log = until(boot_old(4), "Load weight begin").say(NINJA, 3).tick(1)
    log.say(
        'Scheduler hit an exception: Traceback (most recent call last):\n  File "x"\nOSError: x'
    )
    verdict = Replay().run(log.lines, then=10)
    assert verdict is not None and verdict.rank == "TP3"


def test_a_traceback_that_was_survived_is_not_the_cause() -> None:
    log = until(boot_new(1), "Load weight begin")
    log.raw('Traceback (most recent call last):\n  File "x"\nOSError: no telemetry').tick(2)
    log.say("Memory pool end. avail mem=1 GB").say("KV Cache is allocated. #tokens: 1")
    end = log.second + 5
    replay = Replay(vitals=lambda now: Vitals(alive=now < end, exit_code=1))
    verdict = replay.run(log.lines, then=20)
    assert verdict is not None and "does not say why" in verdict.reason


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (UNRECOGNIZED, "preflight"),
        (
            "sglang serve: error: unrecognized arguments: --speculative-disable-batch-threshold 4",
            "plugin is not loaded",
        ),
        (
            "sglang serve: error: ambiguous option: --spec could match --spec-a, --spec-b",
            "preflight",
        ),
        ("launch_server.py: error: argument --port: invalid int value: 'x'", "preflight"),
    ],
)
def test_a_refused_command_line_is_terminal_at_once(line: str, hint: str) -> None:
    log = LogWriter().raw(USER_WARNING).tick(5).raw("usage: launch_server.py [-h]").raw(line)
    replay = Replay()
    verdict = replay.run(log.lines, then=5)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED
    assert hint in verdict.hint
    assert replay.now < 8


CAUSES = [
    ("zmq.error.ZMQError: Address already in use", "pgrep -fa sglang"),
    ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", "hub"),
    (
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current "
        "value: mem_fraction_static=0.3",
        "raise --mem-fraction-static",
    ),
    (
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2 GiB",
        "graph capture ran out of memory",
    ),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "the GPU is full"),
    (
        "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute "
        "'set_eagle3_layers_to_capture'",
        "EAGLE-3 hook",
    ),
    ("TypeError: '>' not supported between instances of 'NoneType' and 'int'", "together"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: x", "damaged"),
    ("RuntimeError: CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING"),
    ("OSError: [Errno 28] No space left on device", "disk is full"),
    ("ValueError: Unsupported config option 'disable_cuda_graph' with action 'X'", "names the key"),
]


@pytest.mark.parametrize(("exception", "hint"), CAUSES, ids=[c[0][:40] for c in CAUSES])
def test_known_causes_come_with_advice(exception: str, hint: str) -> None:
    log = until(boot_old(1), "Load weight begin")
    log.say(
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        f'  File "x.py", line 1, in f\n    g()\n{exception}\n'
    ).say(SIGQUIT)
    verdict = Replay().run(log.lines, then=5)
    assert verdict is not None
    assert verdict.reason == exception
    assert hint in verdict.hint


def test_exit_status_zero_after_a_crash_is_still_a_crash() -> None:
    log = until(boot_old(1), "Load weight begin").say(NINJA).say(SIGQUIT)
    gone = Replay(vitals=lambda now: Vitals(alive=now < log.second, exit_code=0))
    verdict = gone.run(log.lines, then=5)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED
    assert "ninja" in verdict.reason


def test_a_process_that_vanishes_without_a_word() -> None:
    log = until(boot_old(1), "Load weight begin")
    replay = Replay(
        vitals=lambda now: Vitals(alive=now < log.second + 3, exit_code=-9, oom_kills=1)
    )
    verdict = replay.run(log.lines, then=20)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED
    assert "exit code -9" in verdict.reason and "OOM" in verdict.reason
    assert replay.now - log.second < 8
    assert verdict.evidence[-1].endswith("Load weight begin. avail mem=78.46 GB")


def test_a_killed_scheduler_is_seen_though_the_launcher_waits_for_ever() -> None:
    """The case of a later rank that the OOM killer took: the log just stops."""
    log = until(boot_old(8), "4/4")
    replay = Replay(
        vitals=lambda now: Vitals(
            alive=True, cpu_seconds=now, lost=("TP5", "TP6") if now > log.second + 10 else ()
        )
    )
    verdict = replay.run(log.lines, then=60)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED
    assert verdict.rank == "TP5"
    assert "oom" in verdict.hint
    assert replay.now - log.second < 15


def test_the_launchers_own_word_about_a_killed_rank() -> None:
    log = until(boot_new(8), "4/4").raw("")
    log.say(
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "engine.py", line 1, in wait\n    raise error\n'
        "RuntimeError: Rank 5 scheduler died during initialization (exit code: -9). If exit code "
        "is -9 (SIGKILL), a common cause is the OS OOM killer.\n"
    )
    verdict = Replay().run(log.lines, then=5)
    assert verdict is not None
    assert "Rank 5 scheduler died" in verdict.reason
    assert "OOM killer" in verdict.hint


@pytest.mark.parametrize(("code", "outcome"), [(-15, Outcome.STOPPED), (-11, Outcome.CRASHED)])
def test_a_terminated_scheduler_was_stopped_and_did_not_crash(code: int, outcome: Outcome) -> None:
    log = until(boot_new(2), "4/4").raw("")
    log.say(
        f"Subprocess scheduler_0 (pid=77) crashed with exit code {code}. Triggering SIGQUIT for "
        "cleanup..."
    ).say("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
    verdict = Replay().run(log.lines, then=5)
    assert verdict is not None and verdict.outcome is outcome
    assert f"exit code {code}" in verdict.reason


def test_a_piped_log_that_ends_is_a_stopped_container() -> None:
    log = until(boot_old(1), "Load weight begin")
    replay = Replay()
    assert replay.run(log.lines) is None
    replay.boot.on_log_end(replay.now)
    verdict = replay.run([], then=30)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED
    assert "the log has ended" in verdict.reason


def test_clean_twin_a_piped_log_may_end_while_the_server_answers() -> None:
    log = boot_old(1)
    replay = Replay(token_error=lambda now: "" if now > log.second + 60 else "no answer")
    replay.health = healthy_after(log.second)
    assert replay.run(log.lines) is None
    replay.boot.on_log_end(replay.now)
    verdict = replay.run([], then=100)
    assert verdict is not None and verdict.outcome is Outcome.READY


def test_a_traceback_that_ends_the_log_is_the_end_where_no_process_can_be_seen() -> None:
    log = LogWriter().raw(USER_WARNING).tick(3)
    log.raw('Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no such model')
    replay = Replay()
    verdict = replay.run(log.lines, then=100)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED
    assert verdict.reason == "ValueError: no such model"
    assert replay.now < 60


@pytest.mark.parametrize(
    "words",
    [
        HANDLED,
        "Ignore import error when loading sglang.srt.models.grok: no attribute 'x'",
        'post-warmup freeze_gc failed\nTraceback (most recent call last):\n  File "x"\nOSError: x',
        "Scheduler watchdog timeout (self.watchdog_timeout=300.0, self.soft=True)",
        "TP rank 1 could finish the model loading, but there are other ranks that didn't finish",
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
        "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.1 -> 0.3",
        "[rank0]:[W1022 10:27:56 ProcessGroupNCCL.cpp:4561] using GPU 0 to perform barrier",
    ],
)
def test_clean_twin_words_that_pass_raise_no_alarm(words: str) -> None:
    log = until(boot_new(2), "Load weight begin")
    log.say(words, 1).tick(40)
    log.lines += [
        type(line)(line.second + log.second, line.data)
        for line in boot_new(2).lines
        if b"server_args" not in line.data and b"UserWarning" not in line.data
    ]
    replay = Replay(health=healthy_after(log.lines[-1].second))
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None and verdict.outcome is Outcome.READY


def test_a_handled_plugin_failure_is_told_with_its_exception() -> None:
    boot = BootState(0.0)
    Replay(boot).run(LogWriter().say(new_args()).say(HANDLED).say("next").lines, then=2)
    (note,) = boot.notes.values()
    assert note.endswith("ModuleNotFoundError: No module named 'other.plugin'")


def test_health_200_for_an_hour_after_the_scheduler_died_is_no_readiness() -> None:
    log = boot_old(1)
    log.say(
        'Scheduler hit an exception: Traceback (most recent call last):\n  File "x"\nOSError: x'
    )
    replay = Replay(health=healthy_after(0), token_error=lambda _: "no answer within 60 s")
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED


def test_a_token_that_races_with_a_failure_is_no_readiness() -> None:
    log = boot_old(1)
    log.tick(1).say(f"{NINJA}\n[2026-03-01 12:05:00] next")
    replay = Replay(health=healthy_after(log.second))
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED


# --- a log with a past --------------------------------------------------------------------------


def catch_up(log: LogWriter, boot: BootState, at: float = 0.0) -> Replay:
    replay = Replay(boot, now=at)
    for line in log.lines:
        boot.on_records(replay.reader.feed(line.data), at, old=True)
    boot.on_records(replay.reader.settle(), at, old=True)
    boot.on_growth(replay.reader.take_growth(), at)
    return replay


def test_a_restart_in_the_same_file_inherits_neither_phase_nor_failure() -> None:
    log = until(boot_old(2), "Capture draft cuda graph begin").say(NINJA, 1).say(SIGQUIT)
    log.raw(USER_WARNING).tick(5).say(old_args(2))
    boot = BootState(0.0)
    replay = catch_up(log, boot)
    assert replay.run([], then=5) is None
    assert boot.phase is Phase.ARGUMENTS
    assert boot.boots == 2


def test_a_restart_without_the_launchers_warning_is_seen_by_its_arguments() -> None:
    log = until(boot_old(2), "Load weight end").say(old_args(2))
    boot = BootState(0.0)
    catch_up(log, boot)
    assert (boot.phase, boot.boots) == (Phase.ARGUMENTS, 2)


def test_arguments_that_are_written_twice_are_one_boot() -> None:
    boot = BootState(0.0)
    catch_up(LogWriter().raw(USER_WARNING).say(new_args()).say(new_args()), boot)
    assert boot.boots == 1


def test_an_old_failure_is_refuted_by_a_server_that_answers() -> None:
    log = until(boot_old(1), "Load weight begin").say(NINJA).say(SIGQUIT)
    boot = BootState(0.0)
    replay = catch_up(log, boot)
    replay.health = healthy_after(2)
    verdict = replay.run([], then=10)
    assert verdict is not None and verdict.outcome is Outcome.READY
    assert "earlier boot" in boot.notes["earlier failure"]


def test_an_old_failure_stands_when_nobody_answers() -> None:
    log = until(boot_old(1), "Load weight begin").say(NINJA).say(SIGQUIT)
    verdict = catch_up(log, BootState(0.0)).run([], then=5)
    assert verdict is not None and verdict.outcome is Outcome.CRASHED


def test_a_failure_from_before_the_process_started_is_not_its_own() -> None:
    log = until(boot_old(1), "Load weight begin").say(NINJA).say(SIGQUIT)
    boot = BootState(0.0)
    replay = catch_up(log, boot, at=-100.0)
    replay.now = 0.0
    replay.vitals = lambda now: Vitals(alive=True, started_at=-5.0, cpu_seconds=now)
    assert replay.run([], then=10) is None


# --- hung ---------------------------------------------------------------------------------------


def test_a_silent_rank_is_named_when_the_others_are_through() -> None:
    log = until(boot_old(8), "4/4").raw("")
    for rank in range(5):
        log.say("Load weight end. type=X, avail mem=62.1 GB, mem usage=15.0 GB.", rank)
    replay = Replay(vitals=lambda _: Vitals(alive=True))
    verdict = replay.run(log.lines, then=2000)
    assert verdict is not None and verdict.outcome is Outcome.HUNG
    assert "5 of 8 ranks are through, not TP5, TP6, TP7" in verdict.reason
    assert verdict.rank == "TP5"
    assert replay.now - log.second == pytest.approx(301, abs=2)


def test_spinning_ranks_excuse_a_silence_for_longer_but_not_for_ever() -> None:
    log = until(boot_old(8), "4/4")
    replay = Replay(vitals=alive)
    verdict = replay.run(log.lines, then=4000)
    assert verdict is not None and verdict.outcome is Outcome.HUNG
    assert "though the CPU is busy" in verdict.reason
    assert replay.now - log.second == pytest.approx(1801, abs=2)


def test_a_log_alone_may_be_silent_for_longer() -> None:
    log = until(boot_old(1), "Capture cuda graph begin")
    replay = Replay()
    assert replay.run(log.lines, then=500) is None
    verdict = replay.run([], then=200)
    assert verdict is not None and verdict.outcome is Outcome.HUNG


def test_our_own_health_checks_in_the_access_log_are_no_life() -> None:
    log = until(boot_old(1), "Capture cuda graph begin")
    for _ in range(400):
        log.tick(1).say('INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 503 Service Unavailable')
    replay = Replay(vitals=lambda _: Vitals(alive=True))
    verdict = replay.run(log.lines, then=5)
    assert verdict is not None and verdict.outcome is Outcome.HUNG


@pytest.mark.parametrize("line", [NCCL, f"[2026-03-01 12:05:00 TP4] {WATCHDOG}"])
def test_watchdogs_are_terminal_even_without_a_traceback(line: str) -> None:
    log = until(boot_old(8), "Capture cuda graph begin").tick(100)
    log.raw(line)
    replay = Replay(vitals=alive, health=lambda _: "ok", token_error=lambda _: "no answer")
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None and verdict.outcome is Outcome.HUNG
    assert verdict.rank in ("rank 4", "TP4")
    assert verdict.hint


def test_health_without_tokens_is_hung_within_minutes() -> None:
    """100 % GPU utilisation at 25 W, health 200, no token."""
    log = boot_new(2)
    replay = Replay(
        vitals=alive,
        health=healthy_after(log.second),
        token_error=lambda _: "no answer within 60 s",
    )
    verdict = replay.run(log.lines, then=1000)
    assert verdict is not None and verdict.outcome is Outcome.HUNG
    assert "no answer within 60 s" in verdict.reason
    assert replay.now - log.second < 310


def test_clean_twin_a_busy_server_that_answers_late_is_alive() -> None:
    log = boot_new(2)
    for _ in range(900):
        log.tick(1).say("Decode batch, #running-req: 60, #token: 9, token usage: 0.99", 0)
    replay = Replay(
        vitals=alive,
        health=healthy_after(0),
        token_error=lambda now: "" if now > log.second else "no answer within 60 s",
    )
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None and verdict.outcome is Outcome.READY


# --- slow but alive -----------------------------------------------------------------------------


def test_clean_twin_a_jit_compilation_of_half_an_hour_is_not_hung() -> None:
    log = until(boot_old(1), "Capture cuda graph begin")
    log.tick(1).say("Entering DeepGEMM JIT Pre-Compile session. It may take a long time", 0)
    replay = Replay(vitals=alive)
    assert replay.run(log.lines, then=1800) is None
    assert "DeepGEMM JIT" in replay.boot.slow(replay.now)


def test_clean_twin_compilers_that_run_are_life() -> None:
    log = until(boot_old(1), "Capture cuda graph begin")
    replay = Replay(vitals=lambda _: Vitals(alive=True, compilers=("cicc", "ptxas")))
    assert replay.run(log.lines, then=3000) is None
    replay.boot.on_vitals(Vitals(alive=True), replay.now)
    assert "cicc, ptxas" in replay.boot.slow(replay.now + 25)


def test_clean_twin_a_cold_page_cache_is_slow_and_says_so() -> None:
    log = until(boot_old(1), "Load weight begin")
    replay = Replay(
        vitals=lambda now: Vitals(alive=True, read_bytes=int(now // 25) * 25 * 50_000_000)
    )
    assert replay.run(log.lines, then=3000) is None
    words = {replay.boot.slow(replay.now + n) for n in range(30)}
    assert any("reading from disk" in word for word in words)


def test_clean_twin_moving_gpu_memory_is_life() -> None:
    log = until(boot_old(1), "Load weight begin")
    replay = Replay(vitals=lambda now: Vitals(alive=True, gpu_bytes=int(now // 60) << 30))
    assert replay.run(log.lines, then=3000) is None


def test_patience_stretches_the_budgets() -> None:
    log = until(boot_old(1), "Capture cuda graph begin")
    replay = Replay(BootState(0.0, patience=3), vitals=lambda _: Vitals(alive=True))
    assert replay.run(log.lines, then=800) is None
    assert replay.run([], then=200) is not None


def test_budgets_follow_what_earlier_boots_took() -> None:
    boot = BootState(0.0)
    boot.expect({Phase.GRAPHS: 1000.0})
    log = until(boot_old(1), "Capture cuda graph begin")
    replay = Replay(boot, vitals=lambda _: Vitals(alive=True))
    assert replay.run(log.lines, then=1900) is None
    assert replay.run([], then=200) is not None


def test_an_estimate_comes_from_earlier_boots() -> None:
    boot = BootState(0.0)
    assert boot.remaining(0.0) is None
    boot.expect({Phase.ARGUMENTS: 10.0, Phase.TARGET_WEIGHTS: 60.0, Phase.HTTP: 5.0})
    log = LogWriter().say(new_args()).tick(10).say("Load weight begin. avail mem=1 GB")
    replay = Replay(boot)
    replay.run(log.lines)
    assert boot.remaining(replay.now + 20) == pytest.approx(45.0)
    assert boot.remaining(replay.now + 100) == pytest.approx(5.0)


# --- the end of patience ------------------------------------------------------------------------


def test_timed_out_tells_what_was_missing() -> None:
    log = until(boot_old(8), "4/4").raw("")
    for rank in range(6):
        log.say("Load weight end. type=X, avail mem=62.1 GB, mem usage=15.0 GB.", rank)
    replay = Replay()
    replay.run(log.lines, then=30)
    verdict = replay.boot.timed_out(replay.now)
    assert verdict.outcome is Outcome.TIMED_OUT
    assert "target weights" in verdict.reason and "TP6, TP7" in verdict.reason


def test_a_log_that_never_appears_says_so() -> None:
    replay = Replay()
    verdict = replay.run([], then=1000)
    assert verdict is not None and verdict.outcome is Outcome.HUNG
    assert "right file" in verdict.hint


def test_secrets_in_quoted_command_lines_are_masked() -> None:
    log = LogWriter().raw("sglang serve: error: unrecognized arguments: --foo --api-key sk-abc123")
    verdict = Replay().run(log.lines, then=5)
    assert verdict is not None
    assert "sk-abc123" not in verdict.reason and "--api-key ***" in verdict.reason


def test_a_server_that_is_told_to_stop_after_its_ready_line_has_not_crashed() -> None:
    log = boot_new(1).tick(5).say("Gracefully exiting... Remaining number of requests 0.")
    replay = Replay(vitals=lambda now: Vitals(alive=now < log.second + 1))
    verdict = replay.run(log.lines, then=10)
    assert verdict is not None and verdict.outcome is Outcome.STOPPED
