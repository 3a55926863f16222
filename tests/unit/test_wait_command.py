"""`sglang-spec-ext wait` as a process against a fake SGLang: log, processes, HTTP, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from wait_logs import NINJA, READY, SIGQUIT, UNRECOGNIZED, LogWriter, boot_new, until

from sglang_spec_ext.ops.wait.command import wait

FAKE = Path(__file__).parents[1] / "fakes" / "fake_sglang.py"
SESSION = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
RUN = "from sglang_spec_ext.ops.wait.command import wait; wait(prog_name='sglang-spec-ext wait')"


class Bench:
    """One test's fake server and the `wait` that looks at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.started: list[subprocess.Popen[bytes]] = []

    def command(self, *steps: dict[str, Any]) -> list[str]:
        scenario = self.folder / "scenario.json"
        scenario.write_text(json.dumps(steps))
        return [sys.executable, str(FAKE), str(scenario), "--port", str(self.port)]

    def serve(self, *steps: dict[str, Any]) -> int:
        with self.log.open("ab") as output:
            server = subprocess.Popen(self.command(*steps), stdout=output, stderr=output)
        self.started.append(server)
        return server.pid

    def begin(self, *words: str, **more: Any) -> subprocess.Popen[bytes]:
        environment = os.environ | {"XDG_STATE_HOME": str(self.folder / "state"), "COLUMNS": "100"}
        waiter = subprocess.Popen(
            [sys.executable, "-c", RUN, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            **more,
        )
        self.started.append(waiter)
        return waiter

    def wait(self, *words: str, **more: Any) -> tuple[int, dict[str, Any], str]:
        """Exit code, the JSON object and what was shown."""
        waiter = self.begin("--json", *words, **more)
        output, shown = waiter.communicate(timeout=120)
        answer = json.loads(output) if output.strip() else {}
        return waiter.returncode, answer, shown.decode()

    def usual(self, pid: int) -> list[str]:
        return ["--url", self.url, "--log", str(self.log), "--pid", str(pid)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def boot(words: str = READY) -> list[dict[str, Any]]:
    """The steps of a healthy boot up to a line with these words."""
    text = b"".join(line.data for line in until(boot_new(2), words).lines).decode()
    head, _, rest = text.partition("Uvicorn")
    steps: list[dict[str, Any]] = [{"scheduler": "TP0"}, {"scheduler": "TP1"}, {"write": head}]
    return [*steps, {"listen": True}, {"write": "Uvicorn" + rest}] if rest else steps


def test_ready_after_a_real_token(bench: Bench) -> None:
    pid = bench.serve(*boot(), {"sleep": 1}, {"health": 200}, {"hang": True})
    code, answer, shown = bench.wait(*bench.usual(pid))
    assert (code, answer["outcome"]) == (0, "ready"), shown
    assert answer["reason"] == "a generated token came back"
    assert answer["ranks"] == 2
    assert [phase["phase"] for phase in answer["phases"]][-1] == "first token"
    assert "READY after" in shown


def test_a_second_boot_has_an_estimate(bench: Bench) -> None:
    whole = boot()[2]["write"]
    begin, _, rest = whole.partition("Loading safetensors")
    steps = [{"sleep": 2}, {"write": begin}, {"sleep": 2}, {"write": "Loading safetensors" + rest}]
    for attempt in range(2):
        bench.log.unlink(missing_ok=True)
        pid = bench.serve(*steps, *boot()[3:], {"health": 200}, {"hang": True})
        code, _, shown = bench.wait(*bench.usual(pid))
        assert code == 0, shown
        assert ("to go by earlier boots" in shown) is bool(attempt)
        psutil.Process(pid).kill()


def test_each_data_parallel_rank_must_answer(bench: Bench) -> None:
    steps = [{"info": {"dp_size": 2}}, {"health": 200}, {"listen": True}]
    bench.serve(*steps, {"hang": True})
    time.sleep(0.5)
    code, _, shown = bench.wait("--url", bench.url)
    assert code == 0, shown


def test_a_stuck_data_parallel_rank_is_no_readiness(bench: Bench) -> None:
    bench.serve(
        {"info": {"dp_size": 2}}, {"stuck_dp_rank": 1}, {"health": 200}, {"listen": True},
        {"hang": True},
    )  # fmt: skip
    code, answer, shown = bench.wait("--url", bench.url, "--timeout", "4")
    assert (code, answer["outcome"]) == (4, "timed out"), shown


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("empty", "without a token"),
        ("error", "HTTP 500"),
        ("odd", "failed ("),
        ("unauthorized", "--api-key"),
    ],
)
def test_answers_that_are_no_token_are_named(bench: Bench, mode: str, words: str) -> None:
    bench.serve({"generate": mode}, {"health": 200}, {"listen": True}, {"hang": True})
    time.sleep(0.5)
    code, answer, shown = bench.wait("--url", bench.url, "--timeout", "3")
    assert code == 4, shown
    assert words in answer["reason"]


def test_a_key_opens_the_door(bench: Bench) -> None:
    bench.serve({"generate": "unauthorized"}, {"health": 200}, {"listen": True}, {"hang": True})
    code, _, shown = bench.wait("--url", bench.url, "--api-key", "sk-secret-0123456789abcdef")
    assert code == 0, shown
    assert "sk-secret" not in shown


def test_an_embedding_server_is_asked_for_an_embedding(bench: Bench) -> None:
    info = {"info": {"is_embedding": True}}
    bench.serve(info, {"health": 200}, {"listen": True}, {"hang": True})
    code, _, shown = bench.wait("--url", bench.url)
    assert code == 0, shown


def test_no_probe_sends_no_request(bench: Bench) -> None:
    pid = bench.serve({"generate": "error"}, *boot(), {"health": 200}, {"hang": True})
    code, answer, shown = bench.wait(*bench.usual(pid), "--no-probe")
    assert code == 0, shown
    assert "no token was asked for" in answer["reason"]
    assert b"POST /generate" not in bench.log.read_bytes().partition(READY.encode())[2]


def test_a_crash_with_exit_status_zero_tells_the_first_cause(bench: Bench) -> None:
    failed = LogWriter(2).say(NINJA, 1).say(SIGQUIT)
    text = b"".join(line.data for line in failed.lines).decode()
    pid = bench.serve(*boot("Load weight end"), {"write": text}, {"exit": 0})
    begin = time.monotonic()
    code, answer, shown = bench.wait(*bench.usual(pid))
    assert code == 1, shown
    assert (answer["rank"], answer["reason"][:17]) == ("TP1", "FileNotFoundError")
    assert "what to do: ninja" in shown
    assert time.monotonic() - begin < 60


def test_a_killed_scheduler_is_told_while_the_launcher_hangs(bench: Bench) -> None:
    pid = bench.serve(*boot("Load weight begin"), {"sleep": 10}, {"kill": "TP1"}, {"hang": True})
    code, answer, shown = bench.wait(*bench.usual(pid))
    assert code == 1, shown
    assert answer["rank"] == "TP1"
    assert "scheduler process TP1 is gone" in answer["reason"]


def test_a_scheduler_that_died_before_we_came_is_found(bench: Bench) -> None:
    pid = bench.serve(*boot("Load weight begin"), {"sleep": 1}, {"kill": "TP1"}, {"hang": True})
    time.sleep(3)
    code, answer, shown = bench.wait(*bench.usual(pid))
    assert code == 1, shown
    assert "is gone" in answer["reason"]


def test_a_vanished_process_is_told(bench: Bench) -> None:
    pid = bench.serve({"write": "importing\n"}, {"sleep": 3}, {"exit": 3})
    code, answer, shown = bench.wait(*bench.usual(pid))
    assert code == 1, shown
    assert "the server process is gone" in answer["reason"]
    assert answer["evidence"] == ["importing"]


def test_a_silent_boot_is_hung_when_patience_is_over(bench: Bench) -> None:
    pid = bench.serve(*boot("Memory pool"), {"hang": True})
    code, answer, shown = bench.wait(*bench.usual(pid), "--patience", "0.03")
    assert (code, answer["outcome"]) == (3, "hung"), shown
    assert "memory pool" in answer["reason"]


def test_a_log_that_does_not_exist_yet_is_waited_for(bench: Bench) -> None:
    waiter = bench.begin("--url", bench.url, "--log", str(bench.log), "--json")
    time.sleep(2)
    bench.serve(*boot(), {"health": 200}, {"hang": True})
    output, shown = waiter.communicate(timeout=60)
    assert waiter.returncode == 0, shown
    assert json.loads(output)["ranks"] == 2


def test_a_log_from_a_pipe(bench: Bench) -> None:
    command = bench.command(*boot(), {"health": 200}, {"hang": True})
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    bench.started.append(server)
    code, answer, shown = bench.wait("--url", bench.url, "--log", "-", stdin=server.stdout)
    assert code == 0, shown
    assert answer["ranks"] == 2


def test_a_log_that_the_shell_makes_of_a_command(bench: Bench) -> None:
    """`--log <(docker logs -f NAME 2>&1)`: a path that is a pipe and cannot be sought in."""
    command = bench.command(*boot(), {"health": 200}, {"hang": True})
    os.mkfifo(bench.folder / "fifo")
    with open(os.open(bench.folder / "fifo", os.O_RDWR), "wb") as both_ends:
        bench.started.append(subprocess.Popen(command, stdout=both_ends, stderr=both_ends))
        code, answer, shown = bench.wait("--url", bench.url, "--log", "fifo")
    assert code == 0, shown
    assert answer["ranks"] == 2


def test_a_log_that_this_user_may_not_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    result = CliRunner().invoke(wait, ["--log", str(tmp_path / "log")])
    assert result.exit_code == 2
    assert "may not be read by this user" in result.output


def test_a_pipe_that_ends_tells_what_it_said_last(bench: Bench) -> None:
    command = bench.command({"write": UNRECOGNIZED}, {"exit": 2})
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    bench.started.append(server)
    code, answer, shown = bench.wait("--url", bench.url, "--log", "-", stdin=server.stdout)
    assert code == 1, shown
    assert answer["reason"].startswith("unrecognized arguments")


def test_launch_starts_a_detached_server_and_waits(bench: Bench) -> None:
    command = bench.command(*boot(), {"health": 200}, {"hang": True})
    code, answer, shown = bench.wait("--launch", "--", *command, "--outlive-parent")
    log = bench.folder / "sglang-server.log"
    pid = int((bench.folder / "sglang-server.log.pid").read_text())
    server = psutil.Process(pid)
    try:
        assert code == 0, shown
        assert answer["outcome"] == "ready"
        assert READY in log.read_text()
        assert server.is_running()
        assert os.getsid(pid) == pid, "a session of its own: a hang-up cannot reach it"
        code, _, shown = bench.wait("--launch", "--", *command, "--outlive-parent")
        assert code == 2
        assert f"still runs (pid {pid})" in shown
        code, _, shown = bench.wait("--launch", "--log", "other.log", "--", *command)
        assert code == 2
        assert "already listens" in shown
    finally:
        for child in [*server.children(recursive=True), server]:
            child.kill()


def test_a_launched_server_survives_the_end_of_its_ssh_session(bench: Bench) -> None:
    """The terminal goes away: `wait`, which is its session's leader, gets the hang-up."""
    command = bench.command(*boot("Memory pool"), {"hang": True})
    terminal, end = pty.openpty()
    words = ["--launch", "--", *command, "--outlive-parent"]
    waiter = subprocess.Popen(
        [sys.executable, "-c", SESSION + RUN, *words], stdin=end, stdout=end, stderr=end,
        cwd=bench.folder, env=os.environ | {"XDG_STATE_HOME": str(bench.folder), "TERM": "xterm"},
        start_new_session=True,
    )  # fmt: skip
    bench.started.append(waiter)
    os.close(end)
    pid_file = bench.folder / "sglang-server.log.pid"
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
        os.set_blocking(terminal, False)
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 65536)
    server = psutil.Process(int(pid_file.read_text()))
    try:
        time.sleep(1)
        os.close(terminal)
        assert waiter.wait(timeout=30) == -signal.SIGHUP
        time.sleep(1)
        assert server.is_running() and server.status() != psutil.STATUS_ZOMBIE
        log = bench.folder / "sglang-server.log"
        code, answer, shown = bench.wait(
            "--pid", str(server.pid), "--log", str(log), "--timeout", "2"
        )
        assert (code, answer["phase"]) == (4, "memory pool"), shown
    finally:
        for child in [*server.children(recursive=True), server]:
            child.kill()


def test_launch_tells_the_exit_code_and_only_this_boots_log(bench: Bench) -> None:
    (bench.folder / "sglang-server.log").write_text(f"[2026-03-01 11:00:00] {SIGQUIT}\n")
    command = bench.command({"write": UNRECOGNIZED + "\n"}, {"exit": 2})
    code, answer, shown = bench.wait("--launch", "--", *command)
    assert code == 1, shown
    assert answer["reason"].startswith("unrecognized arguments")


def test_ctrl_c_leaves_the_server_alone(bench: Bench) -> None:
    pid = bench.serve(*boot("Memory pool"), {"hang": True})
    waiter = bench.begin(*bench.usual(pid))
    time.sleep(3)
    waiter.send_signal(signal.SIGINT)
    shown = waiter.communicate(timeout=30)[0].decode()
    assert waiter.returncode == 130
    assert "left alone" in shown and f"--pid {pid}" in shown
    waiter = bench.begin(*bench.usual(pid), "--json")
    time.sleep(3)
    waiter.send_signal(signal.SIGINT)
    told, _ = waiter.communicate(timeout=30)
    expected = {"outcome": "interrupted", "exit_code": 130, "phase": "memory pool"}
    assert (waiter.returncode, json.loads(told)) == (130, expected)
    assert psutil.Process(pid).is_running()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([], "--url, --log, --pid or --launch"),
        (["--launch"], "--launch needs the server's command"),
        (["--url", "http://127.0.0.1:1", "--", "python"], "use --launch"),
        (["--launch", "--pid", "1", "--", "python"], "leave --pid out"),
        (["--launch", "--log", "-", "--", "python"], "give a file"),
        (["--launch", "--", "no-such-program-here"], "no such program"),
        (["--log", "."], "is a folder"),
        (["--url", "x", "--timeout", "-1"], "--timeout"),
        (["--url", "http://[::1"], "is no address of a server"),
        (["--url", "ftp://x"], "is no address of a server"),
        (["--launch", "--", "python", "--port", "many"], "is no address of a server"),
    ],
)
def test_bad_arguments_exit_2_and_name_the_fix(bench: Bench, words: list[str], fix: str) -> None:
    code, answer, shown = bench.wait(*words)
    assert (code, answer) == (2, {})
    assert fix in shown
