"""The demo without SGLang: its reading, judging, installing and stopping, and all of it together
against a fake server."""

from __future__ import annotations

import fcntl
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.demo import DemoError, install, server_log, verdict
from testbed.demo.install import Environment, PipProgress
from testbed.demo.processes import ProcessTree, session_members
from testbed.demo.progress import Progress
from testbed.demo.server_log import (
    SPECULATING,
    TARGET_ONLY,
    DecodeStep,
    LogFollower,
    Switch,
)

CHECKOUT = Path(__file__).resolve().parents[2]
FAKE_SERVER = Path(__file__).with_name("demo_fake_server.py")

OFF_LINE = (
    "[2026-11-29 18:52:28] spec-ext switch: speculating -> target-only, batch=6, N=4, M=3, "
    "steps since last switch=37"
)
DECODE_LINE = (
    "[2026-11-29 18:53:49] Decode batch, #running-req: 3, #token: 32, token usage: 0.00, "
    "accept len: 3.25, accept rate: 0.75, cpu graph: False, gen throughput (token/s): 60.67, "
    "#queue-req: 0"
)


def switch(mode: str, batch: int) -> Switch:
    return Switch(mode, batch, 4, 4, "the line")


# -- reading the server's log


def test_parse_switch() -> None:
    assert server_log.parse(OFF_LINE) == Switch(TARGET_ONLY, 6, 4, 3, OFF_LINE)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (DECODE_LINE, DecodeStep(3, 3.25)),
        (DECODE_LINE.replace("accept len: 3.25, accept rate: 0.75, ", ""), DecodeStep(3, None)),
        (
            "[2026-11-29 18:53:49] Decode batch [71], #running-req: 8, #token: 9",
            DecodeStep(8, None),
        ),
        ("[2026-11-29 18:53:49] Prefill batch, #new-seq: 1, #running-req: 0", None),
        ("spec-ext active: N=4, M=4, K=4, max_running_requests=8", None),
    ],
)
def test_parse_decode_step(line: str, step: DecodeStep | None) -> None:
    assert server_log.parse(line) == step


def test_boot_phase_names_the_last_milestone() -> None:
    assert server_log.boot_phase("[x] The server is fired up and ready to roll!") == "ready"
    assert server_log.boot_phase("[x] Load weight begin. avail mem=1 GB") == "loading weights"
    assert server_log.boot_phase("[x] a line about anything else") is None


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("", "its log is empty"),
        ("[x] booting\nusage: ...\nlaunch_server.py: error: unknown flag", "error: unknown flag"),
        (
            "[x] Scheduler hit an exception: \nTraceback (most recent call last):\n  File ...\n"
            "    raise\nRuntimeError: the cause\n\nTraceback (most recent call last):\n  File\n"
            "KeyError: what followed\n",
            "RuntimeError: the cause ... KeyError: what followed",
        ),
    ],
)
def test_cause_of_failure(log: str, cause: str) -> None:
    assert server_log.cause_of_failure(log.splitlines()).endswith(cause)


def test_log_follower_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntw")
    follower = LogFollower(path)
    assert follower.new_lines() == ["one"]
    assert follower.new_lines() == []
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert follower.new_lines() == ["two", "three"]


# -- judging


def test_row_weights_each_step_by_its_requests() -> None:
    row = verdict.summarize("x", [DecodeStep(3, 4.0), DecodeStep(1, 2.0)])
    assert row == verdict.Row("x", (3, 1), SPECULATING, 3.5)


def test_row_without_speculation_has_no_accept_length() -> None:
    row = verdict.summarize("x", [DecodeStep(5, None), DecodeStep(8, None), DecodeStep(6, None)])
    assert row == verdict.Row("x", (8, 6), TARGET_ONLY, None)


def test_row_names_mixed_modes_and_ignores_switches() -> None:
    row = verdict.summarize("x", [DecodeStep(4, 3.0), switch(TARGET_ONLY, 5), DecodeStep(5, None)])
    assert row is not None and (row.mode, row.accept_length) == ("both", 3.0)
    assert verdict.summarize("x", [switch(TARGET_ONLY, 5)]) is None


def test_split_at_switches() -> None:
    a, b, c = DecodeStep(4, 3.0), DecodeStep(5, None), DecodeStep(4, 3.0)
    events: list[verdict.Event] = [a, switch(TARGET_ONLY, 5), b, switch(SPECULATING, 4), c]
    assert verdict.split_at_switches(events) == [[a], [b], [c]]
    assert verdict.split_at_switches([]) == [[]]


@pytest.mark.parametrize(
    ("switches", "held"),
    [
        ([switch(TARGET_ONLY, 5), switch(SPECULATING, 4)], True),
        ([switch(TARGET_ONLY, 8), switch(SPECULATING, 1)], True),
        ([], False),
        ([switch(TARGET_ONLY, 5)], False),
        ([switch(SPECULATING, 4), switch(TARGET_ONLY, 5)], False),
        ([switch(TARGET_ONLY, 4), switch(SPECULATING, 4)], False),
        ([switch(TARGET_ONLY, 5), switch(SPECULATING, 5)], False),
        ([switch(TARGET_ONLY, 5), switch(SPECULATING, 4), switch(TARGET_ONLY, 5)], False),
    ],
)
def test_switch_check(switches: list[verdict.Event], held: bool) -> None:
    assert verdict.switch_check([DecodeStep(1, 3.0), *switches], 4).held is held


@pytest.mark.parametrize(
    ("length", "before", "held"),
    [
        (3.4, 3.4, True),
        (3.3, 3.4, True),
        (3.5, 3.4, True),
        (3.2, 3.4, False),
        (1.2, 4.0, False),
        (1.0, 1.0, False),  # nothing was ever accepted: equal, and a failure
        (None, 3.4, False),
        (3.4, None, False),
    ],
)
def test_accept_check(length: float | None, before: float | None, held: bool) -> None:
    def row(accept: float | None) -> verdict.Row:
        return verdict.Row("x", (1, 1), SPECULATING, accept)

    assert verdict.accept_check("x", row(length), row(before)).held is held
    assert not verdict.accept_check("x", None, row(before)).held


def test_mode_check() -> None:
    rows = [verdict.Row("x", (1, 1), mode, None) for mode in (SPECULATING, TARGET_ONLY)]
    assert verdict.mode_check(rows, [SPECULATING, TARGET_ONLY]).held
    assert not verdict.mode_check(rows, [SPECULATING, SPECULATING]).held
    assert not verdict.mode_check([rows[0], None], [SPECULATING, TARGET_ONLY]).held


def test_output_check_names_the_first_difference() -> None:
    assert verdict.output_check([[1, 2], [3, 4]], [[1, 2], [3, 4]]).held
    check = verdict.output_check([[1, 2], [3, 5], [0]], [[1, 2], [3, 4], [9]])
    assert not check.held
    assert "1 of 3" in check.text and check.text.endswith("request 1, output token 1")
    assert verdict.output_check([[1, 2]], [[1]]).text.endswith("request 0, output token 1")


def test_rate_counts_a_half_open_interval() -> None:
    arrivals = [(1.0, 100), (2.0, 4), (3.0, 6), (4.0, 100)]
    assert verdict.rate(arrivals, 1.0, 3.0) == 5.0
    assert verdict.rate(arrivals, 3.0, 3.0) is None


# -- the environment


class Installer:
    """Records the steps instead of running them; makes what `python -m venv` would make."""

    def __init__(self, environment: Environment) -> None:
        self.steps: list[str] = []
        self.interrupt_at: str | None = None
        self._environment = environment

    def step(self, title: str, command: list[str]) -> None:
        self.steps.append(title)
        if title == self.interrupt_at:
            raise KeyboardInterrupt
        if title == "environment":
            self._environment.python.parent.mkdir(parents=True)
            self._environment.python.symlink_to(sys.executable)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project]\n")
    return folder


@pytest.fixture
def run_install(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Runs one installation as a process of its own would; returns the steps it took."""
    monkeypatch.setattr(install, "check_disk", lambda folder: None)

    def run(interrupt_at: str | None = None) -> list[str]:
        environment = Environment(tmp_path / "env", checkout)
        installer = Installer(environment)
        installer.interrupt_at = interrupt_at
        monkeypatch.setattr(environment, "_step", installer.step)
        try:
            environment.ensure()
        except KeyboardInterrupt:
            installer.steps.append("interrupted")
        assert environment._lock_fd is not None
        os.close(environment._lock_fd)
        return installer.steps

    return run


ALL_STEPS = ["environment", "SGLang 0.5.23", "this checkout"]


def test_complete_environment_is_reused(run_install: Callable[..., list[str]]) -> None:
    assert run_install() == ALL_STEPS
    assert run_install() == []


def test_interrupted_installation_begins_anew(
    run_install: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert run_install("SGLang 0.5.23")[-1] == "interrupted"
    (tmp_path / "env" / "half-a-package").mkdir()
    assert run_install() == ALL_STEPS
    assert not (tmp_path / "env" / "half-a-package").exists()


def test_interrupted_checkout_does_not_cost_sglang_again(
    run_install: Callable[..., list[str]],
) -> None:
    assert run_install("this checkout")[-1] == "interrupted"
    assert run_install() == ["this checkout"]


def test_new_metadata_is_installed(run_install: Callable[..., list[str]], checkout: Path) -> None:
    run_install()
    (checkout / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert run_install() == ["this checkout"]


def test_lost_base_python_means_a_new_environment(
    run_install: Callable[..., list[str]], tmp_path: Path
) -> None:
    run_install()
    python = tmp_path / "env" / "bin" / "python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert run_install() == ALL_STEPS


def test_foreign_folder_is_left_alone(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "thesis.tex").touch()
    with pytest.raises(DemoError, match=r"did not make.*--env"):
        Environment(tmp_path / "env", checkout).ensure()
    assert os.listdir(tmp_path / "env") == ["thesis.tex"]


def test_too_little_disk_is_refused_with_numbers(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free / 1e9
    with pytest.raises(DemoError, match=rf"needs {free + 100:.0f} GB.*free 100\.\d GB more.*--env"):
        install.check_disk(tmp_path, free + 100)
    install.check_disk(tmp_path, 0)


def test_two_demos_do_not_install_at_once(
    run_install: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_install("this checkout")
    other = os.open(tmp_path / "env" / "demo.lock", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    steps: list[str] = []
    waiting = threading.Thread(target=lambda: steps.extend(run_install()))
    waiting.start()
    while "waiting for another demo" not in capsys.readouterr().out:
        time.sleep(0.01)
    assert steps == []
    os.close(other)
    waiting.join()
    assert steps == ["this checkout"]


def test_python_too_old_for_sglang_looks_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if "11" in name else None)
    assert install.suitable_python() == "/usr/bin/python3.11"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DemoError, match=r"needs Python 3\.11 or newer"):
        install.suitable_python()


def test_failed_step_shows_the_end_of_its_output(tmp_path: Path, checkout: Path) -> None:
    command = [sys.executable, "-c", "print('no matching distribution'); raise SystemExit(7)"]
    with pytest.raises(DemoError, match=r"(?s)thing failed with exit status 7.*no matching"):
        Environment(tmp_path, checkout)._step("thing", command)


def test_environment_without_the_plugin_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install.importlib.metadata, "version", lambda name: "0.5.23")
    no_plugin = install.importlib.metadata.EntryPoints(())
    monkeypatch.setattr(install.importlib.metadata, "entry_points", lambda group: no_plugin)
    with pytest.raises(DemoError, match="pip install --editable /some/checkout"):
        install.check_environment(Path("/some/checkout"))


def test_pip_progress(tmp_path: Path) -> None:
    progress = PipProgress(tmp_path)
    for line, detail in (
        ("Collecting sglang==0.5.23", "sglang==0.5.23"),
        ("  Downloading sglang-0.5.23-py3-none-any.whl.metadata (9 kB)", "sglang==0.5.23"),
        ("  Using cached torch-2.14.1-cp311-cp311-manylinux.whl (900.1 MB)", "torch (900.1 MB)"),
        ("Requirement already satisfied: pip", "torch (900.1 MB)"),
        ("Collecting numpy>=2 (from sglang==0.5.23)", "numpy>=2"),
    ):
        progress.read(line)
        assert (progress.phase, progress.detail()) == ("choosing and downloading packages", detail)
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "pip-24.0.dist-info").mkdir(parents=True)
    progress.read("Installing collected packages: torch, numpy, sglang")
    (packages / "torch-2.14.1.dist-info").mkdir()
    assert (progress.phase, progress.detail()) == ("unpacking", "1 of 3 packages")


def test_progress_in_a_pipe_is_a_line_per_phase() -> None:
    pipe = io.StringIO()
    progress = Progress("the server", pipe)
    for phase, detail in (("loading", "a"), ("loading", "b"), ("warming up", "")):
        progress.update(phase, detail)
    progress.done("ready")
    assert [line.split("  ")[1] for line in pipe.getvalue().splitlines()] == [
        "the server: loading, a",
        "the server: warming up",
        "the server: ready",
    ]


# -- processes

# A child that ignores SIGTERM, and a grandchild in a process group of its own that does too.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "grandchild"], process_group=0)
else:
    print("both run", flush=True)
time.sleep(600)
"""


def wait_for_line(log: Path, text: str) -> None:
    while not log.exists() or text not in log.read_text():
        time.sleep(0.02)


def test_tree_is_stopped_even_if_it_ignores_sigterm(tmp_path: Path) -> None:
    script, log = tmp_path / "stubborn.py", tmp_path / "log"
    script.write_text(STUBBORN)
    tree = ProcessTree([sys.executable, str(script)], log)
    with tree:
        wait_for_line(log, "both run")
        assert tree._leader is not None
        session = tree._leader.pid
        assert len(session_members(session)) == 2
        tree.stop()
        assert session_members(session) == []
    assert tree.exit_status() == -signal.SIGKILL


def test_tree_whose_leader_died_is_stopped_too(tmp_path: Path) -> None:
    script, log = tmp_path / "stubborn.py", tmp_path / "log"
    script.write_text(STUBBORN)
    with ProcessTree([sys.executable, str(script)], log) as tree:
        wait_for_line(log, "both run")
        assert tree._leader is not None
        session = tree._leader.pid
        tree._leader.kill()
        tree._leader.wait()
        assert len(session_members(session)) == 1
        tree.stop()
    assert session_members(session) == []


HELD = """
import os, signal
from testbed.demo.processes import INTERRUPTS
INTERRUPTS.install()
try:
    with INTERRUPTS.held():
        os.kill(os.getpid(), signal.{name})
        print("still inside")
    print("not reached")
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.{name})  # a second one during the clean-up
    print("cleaned up")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_wait_for_the_end_of_what_must_not_be_cut(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELD.format(name=name)],
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "still inside\ncleaned up\n"), done.stderr


# -- all together, against the fake server

# Runs `demo.py --inside` with the fake server in place of SGLang's.
DRIVER = """
import sys
from testbed import engine
from testbed.demo import launcher, server
def command_line(topk, *, port, **flags):
    mode = "plain" if topk is None else "switching"
    fault = "none" if topk is None else {fault!r}
    return [sys.executable, {fake!r}, str(port), mode, fault]
engine.command_line = command_line
server._QUIET_S = 0.1
launcher.check_environment = lambda checkout: None
sys.exit(launcher.main(["--inside", *sys.argv[1:]]))
"""


def demo_command(fault: str, *arguments: str) -> list[str]:
    driver = DRIVER.format(fault=fault, fake=str(FAKE_SERVER))
    return [sys.executable, "-c", driver, *arguments]


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("none", 0, "16 of 16 requests"),
        ("never-switches", 1, "FAILED  one switch to target-only"),
        ("cold-after-resume", 1, "FAILED  accept length, requests in flight across both switches"),
        ("wrong-token", 1, "FAILED  output equals that of a server without the plugin: 8 of 16"),
        ("dies", 1, "FAILED  burst of 8: .+; it ended with status 3: "),
        ("refuses", 1, "starting the scheduler: it ended with status 2: ValueError: no such"),
    ],
)
def test_demo_tells_what_failed(fault: str, status: int, message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        demo_command(fault),
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert re.search(message, done.stdout)
    assert ("The servers' logs: " in done.stdout) == (status != 0)
    assert len(os.listdir(tmp_path)) == (status != 0), "logs are kept exactly when one failed"
    assert "Traceback" not in done.stderr


def test_table_and_switch_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        demo_command("none", "--logs", str(tmp_path / "logs")),
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        check=True,
    )
    burst, tail = (
        next(line for line in done.stdout.splitlines() if name in line and "│" in line)
        for name in ("burst of 8", "burst, 4 or fewer left")
    )
    assert [cell.strip() for cell in burst.split("│")[2:5]] == ["8 to 5", TARGET_ONLY, "-"]
    assert [cell.strip() for cell in tail.split("│")[2:5]] == ["4 to 1", SPECULATING, "4.00"]
    assert done.stdout.count("spec-ext switch: target-only -> speculating, batch=4, N=4") == 2
    assert sorted(os.listdir(tmp_path / "logs")) == ["plain.log", "switching.log"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_boot_leaves_no_process(number: int, tmp_path: Path) -> None:
    demo = subprocess.Popen(
        demo_command("hangs", "--logs", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
    )
    wait_for_line(tmp_path / "switching.log", "server_args=")
    (server,) = children(demo.pid)
    demo.send_signal(number)
    _out, err = demo.communicate()
    assert demo.returncode == 130
    assert "interrupted" in err and "Traceback" not in err
    assert session_members(server) == []


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--python", "/no/such/python"], "is no Python that runs"),
        (["--python", sys.executable, "--env", "x"], "not allowed with"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "demo.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_launcher_part_needs_nothing_but_the_standard_library() -> None:
    # -S: no site-packages at all, as on a fresh machine.
    done = subprocess.run(
        [sys.executable, "-S", str(CHECKOUT / "demo.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
