"""A server of our own is awaited, diagnosed and stopped whole, however the block ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from bench_levels import booted
from pytest_mock import MockerFixture

from sglang_spec_ext.ops.bench import server as module
from sglang_spec_ext.ops.bench.server import (
    BootError,
    Server,
    free_port,
    is_healthy,
    server_info,
)

FAKE = Path(__file__).with_name("bench_fake_server.py")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(
    tmp_path: Path, *options: str, timeout_s: float = 60
) -> tuple[Path, Callable[[], Iterator[Server]]]:
    """The file with the pids of server and child, and the context manager to enter."""
    pids = tmp_path / "pids"
    port = free_port()
    command = [sys.executable, str(FAKE), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--fake-pids", str(pids), *options]
    return pids, lambda: booted(command, os.environ, port, tmp_path / "log", timeout_s)


def test_a_free_port_is_one_that_nobody_is_given_by_chance(mocker: MockerFixture) -> None:
    with module.socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        drawn = mocker.patch.object(module.random, "randrange")
        drawn.side_effect = [taken.getsockname()[1], 20001]
        assert free_port() == 20001
    (_, highest), _ = drawn.call_args
    assert highest < 32768 and highest + 10000 < 2**16


def pids_in(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


def test_up_and_down_again(tmp_path: Path) -> None:
    pids, boot = start(tmp_path)
    with boot() as server:
        assert server.death() is None
        assert server_info(server.url, None)["version"] == "0.0.fake"
        assert "fired up" in server.log.text()
        assert "fired up" not in server.log.text(server.log.position())
        assert [alive(pid) for pid in pids_in(pids)] == [True, True]
    assert [alive(pid) for pid in pids_in(pids)] == [False, False]


def test_stopped_once_since_its_group_id_may_be_anothers_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, boot = start(tmp_path)
    with boot() as server:
        server.stop()
        assert [alive(pid) for pid in pids_in(pids)] == [False, False]
        signalled: list[int] = []
        monkeypatch.setattr(module, "_signal_group", lambda group, number: signalled.append(group))
    assert signalled == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_stopped_when_the_block_fails(tmp_path: Path, error: type[BaseException]) -> None:
    pids, boot = start(tmp_path)
    with pytest.raises(error), boot():
        raise error
    assert [alive(pid) for pid in pids_in(pids)] == [False, False]


def test_a_deaf_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TERM_GRACE_S", 0.2)
    pids, boot = start(tmp_path, "--fake-fault", "ignores-sigterm")
    with boot():
        pass
    assert [alive(pid) for pid in pids_in(pids)] == [False, False]


def test_children_of_a_dead_server_are_stopped(tmp_path: Path) -> None:
    pids, boot = start(tmp_path)
    with boot() as server:
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        death = server.death()
        assert death is not None and "killed by SIGKILL" in death
        assert alive(pids_in(pids)[1])
    assert not alive(pids_in(pids)[1])


def test_a_crash_at_boot_is_explained(tmp_path: Path) -> None:
    pids, boot = start(tmp_path, "--fake-fault", "crashes-at-boot")
    with pytest.raises(BootError, match=r"fake checkpoint is broken.*exited with code 1"), boot():
        pass
    assert not alive(pids_in(pids)[1])


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    pids, boot = start(tmp_path, "--fake-fault", "never-healthy", timeout_s=1)
    with pytest.raises(BootError, match=r"no healthy answer within 1 s \(--boot-timeout\)"), boot():
        pass
    # a slow machine may have stopped it before it wrote its pids
    assert not pids.exists() or [alive(pid) for pid in pids_in(pids)] == [False, False]


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with (
        pytest.raises(BootError, match="cannot start /no/such: No such file"),
        booted(["/no/such"], {}, free_port(), tmp_path / "log", 1),
    ):
        pass


def test_nothing_listens(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert not is_healthy(url)
    assert server_info(url, None) == {}


def test_a_proxy_of_the_environment_is_not_asked(tmp_path: Path) -> None:
    code = (
        "import sys; from sglang_spec_ext.ops.bench.server import is_healthy; "
        "sys.exit(not is_healthy(sys.argv[1]))"
    )

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Healthy) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        proxy = f"http://127.0.0.1:{free_port()}"
        environ = {**os.environ, "http_proxy": proxy, "HTTP_PROXY": proxy, "no_proxy": ""}
        environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        url = f"http://127.0.0.1:{httpd.server_port}"
        done = subprocess.run([sys.executable, "-c", code, url], env=environ, check=False)
        httpd.shutdown()
    assert done.returncode == 0
