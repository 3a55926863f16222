"""Following a log on disk, waking up, and what is remembered between boots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sglang_spec_ext.ops.wait.follow import LogFile, LogPipe
from sglang_spec_ext.ops.wait.history import KEPT, BootHistory, history_file
from sglang_spec_ext.ops.wait.launch import LaunchError, launch, url_of
from sglang_spec_ext.ops.wait.masking import mask
from sglang_spec_ext.ops.wait.patterns import Phase
from sglang_spec_ext.ops.wait.vitals import ProcessWatch
from sglang_spec_ext.ops.wait.wakeup import Wakeup


def new(log: LogFile) -> bytes:
    return b"".join(log.read_new())


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path)
    assert new(log) == b""
    path.write_bytes(b"one\n")
    assert new(log) == b"one\n"
    with path.open("ab") as more:
        more.write(b"two\n")
    assert new(log) == b"two\n"
    assert new(log) == b""


def test_an_offset_skips_earlier_boots(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\nnew\n")
    assert new(LogFile(path, 4)) == b"new\n"


def test_rotation_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    log = LogFile(path)
    assert new(log) == b"one\n"
    with path.open("ab") as more:
        more.write(b"last words\n")
    path.rename(tmp_path / "log.1")
    assert new(log) == b"last words\n"
    path.write_bytes(b"fresh\n")
    assert new(log) == b"fresh\n"


def test_truncation_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a long first boot\n")
    log = LogFile(path)
    new(log)
    path.write_bytes(b"short\n")
    assert new(log) == b"short\n"


def test_a_pipe_is_read_without_waiting_for_it() -> None:
    out, into = os.pipe()
    pipe = LogPipe(out)
    assert list(pipe.read_new()) == []
    os.write(into, b"x")
    assert list(pipe.read_new()) == [b"x"]
    os.close(into)
    assert list(pipe.read_new()) == []
    assert pipe.closed
    os.close(out)


def slept(wakeup: Wakeup, seconds: float = 20.0) -> float:
    begin = time.monotonic()
    wakeup.sleep(seconds)
    return time.monotonic() - begin


def test_events_end_the_sleep_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Wakeup() as wakeup:
        wakeup.on_file(path)
        for act in (lambda: path.write_bytes(b"x"), lambda: path.write_bytes(b"y"), wakeup.ring):
            timer = threading.Timer(0.2, act)
            timer.start()
            assert slept(wakeup) < 15
            timer.join()
            while slept(wakeup, 0.05) < 0.04:
                pass  # one write is more than one event


def test_the_end_of_a_process_wakes_and_is_reported_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with Wakeup() as wakeup:
        wakeup.on_end_of(child.pid)
        assert not wakeup.sleep(0.01)
        child.communicate(b"\n")
        assert wakeup.sleep(20)
        assert not wakeup.sleep(0.01)


def test_a_bell_after_the_end_rings_nowhere() -> None:
    with Wakeup() as wakeup:
        pass
    wakeup.ring()


def test_history_gives_medians_and_keeps_few(tmp_path: Path) -> None:
    history = BootHistory(tmp_path / "deep" / "boots.json")
    assert history.expected("k") == {}
    for seconds in (10.0, 20.0, 90.0):
        history.add("k", {Phase.TARGET_WEIGHTS: seconds})
    assert history.expected("k") == {Phase.TARGET_WEIGHTS: 20.0}
    assert history.expected("other") == {}
    for _ in range(2 * KEPT):
        history.add("k", {Phase.POOL: 1.0})
    assert len(json.loads(history.path.read_text())["k"]) == KEPT
    assert [path.name for path in history.path.parent.iterdir()] == ["boots.json"]


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"k": 5}', '{"k": [7, {"nope": 1}]}'])
def test_a_damaged_history_is_no_history(tmp_path: Path, text: str) -> None:
    path = tmp_path / "boots.json"
    path.write_text(text)
    history = BootHistory(path)
    assert history.expected("k") == {}
    history.add("k", {Phase.POOL: 1.0})
    assert history.expected("k") == {Phase.POOL: 1.0}


def test_a_history_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    BootHistory(tmp_path / "file" / "boots.json").add("k", {Phase.POOL: 1.0})
    (taken := tmp_path / "folder" / "boots.json").mkdir(parents=True)
    BootHistory(taken).add("k", {Phase.POOL: 1.0})
    assert list(taken.parent.iterdir()) == [taken], "nothing half written is left"


def test_the_state_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert history_file() == Path("/state/sglang-spec-ext/boots.json")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert history_file() == Path.home() / ".local/state/sglang-spec-ext/boots.json"


@pytest.mark.parametrize(
    ("words", "url"),
    [
        (["sglang", "serve"], "http://127.0.0.1:30000"),
        (["x", "--port", "31000", "--host", "0.0.0.0"], "http://0.0.0.0:31000"),
        (["x", "--port=31000"], "http://127.0.0.1:31000"),
        (["x", "--port"], "http://127.0.0.1:30000"),
    ],
)
def test_the_url_of_a_command(words: list[str], url: str) -> None:
    assert url_of(words) == url


def test_a_launch_on_no_port_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"--host and --port: 'http://127\.0\.0\.1:many' is no"):
        launch([sys.executable, "--port", "many"], tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_log_that_may_not_be_opened_yet_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    log = LogFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert new(log) == b""
    assert new(log) == b"one\n"


def test_a_stale_pid_file_does_not_stop_a_launch(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "log.pid").write_text(f"{os.getpid()}\n")
    os.utime(tmp_path / "log.pid", (1, 1))  # older than that process: the pid was reused
    launched = launch([sys.executable, "-c", "print('hello')", "--port", "9"], log)
    assert launched.popen.wait(timeout=60) == 0
    assert log.read_text() == "hello\n"
    (tmp_path / "log.pid").write_text("rubbish")
    again = launch([sys.executable, "-c", "print('hello')", "--port", "9"], log)
    assert again.popen.wait(timeout=60) == 0
    assert again.offset == len("hello\n")


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot start"):
        launch([sys.executable, "--port", "9"], tmp_path / "file" / "log")


def test_a_process_that_does_not_exist_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not ProcessWatch(child.pid).look(0.0).alive


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("--api-key abc --port 1", "--api-key *** --port 1"),
        ("--admin-api-key=abc", "--admin-api-key=***"),
        ("api_key='abc', host='x'", "api_key='***', host='x'"),
        ("'api_key': None", "'api_key': None"),
        ("HF_TOKEN=abc python -m x", "HF_TOKEN=*** python -m x"),
        ("AWS_SECRET_ACCESS_KEY='a' W_API_KEY=c", "AWS_SECRET_ACCESS_KEY='***' W_API_KEY=***"),
        ("TOKENIZERS_PARALLELISM=false MAX_TOKENS=5", "TOKENIZERS_PARALLELISM=false MAX_TOKENS=5"),
        ("use hf_abcdefghijklmnopqrstuvwxyz now", "use *** now"),
        ("--max-total-tokens 8192", "--max-total-tokens 8192"),
        ("max_total_num_tokens=914573", "max_total_num_tokens=914573"),
    ],
)
def test_secrets_are_masked_and_numbers_of_tokens_are_not(text: str, masked: str) -> None:
    assert mask(text) == masked
