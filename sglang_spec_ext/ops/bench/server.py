"""A server process of our own: boot it, wait until it answers, stop it and all its children."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sglang_spec_ext.ops.bench.diagnosis import first_cause

# Proxies of the environment are for the outside: a server on this machine is reached directly.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

_POLL_S = 0.25
_TERM_GRACE_S = 10.0
_KILL_GRACE_S = 10.0


class BootError(RuntimeError):
    """The server did not come up; the message is the first cause found in its log."""


@dataclass
class ServerLog:
    """A log file that grows while the server runs."""

    path: Path

    def position(self) -> int:
        return self.path.stat().st_size

    def content(self, start: int = 0) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read()

    def text(self, start: int = 0) -> str:
        return self.content(start).decode("utf-8", errors="replace")


@dataclass
class Server:
    """A server that we started. boot_s: seconds from start to the first healthy answer."""

    url: str
    log: ServerLog
    process: subprocess.Popen[bytes]
    started: float
    boot_s: float | None = None
    _stopped: bool = False

    def stop(self) -> None:
        """Ends it once: after that its group id may be another's."""
        if not self._stopped:
            self._stopped = True
            stop(self.process)

    def is_up(self) -> bool:
        """Whether it has answered by now. Raises BootError if it died before it did."""
        if self.boot_s is None and is_healthy(self.url):
            self.boot_s = time.monotonic() - self.started
        if self.boot_s is None and self.process.poll() is not None:
            raise BootError(_death_notice(self.process, self.log))
        return self.boot_s is not None

    def check_patience(self, timeout_s: float) -> None:
        """Raises BootError if it has been booting for longer than ``timeout_s`` seconds."""
        if time.monotonic() - self.started > timeout_s:
            raise BootError(
                f"no healthy answer within {timeout_s:.0f} s (--boot-timeout); "
                f"its log: {first_cause(self.log.content())}"
            )

    def death(self) -> str | None:
        """Why the server no longer serves, None if it still does."""
        if self.process.poll() is None and is_healthy(self.url, timeout_s=30):
            return None
        return _death_notice(self.process, self.log)


@contextlib.contextmanager
def starting(
    command: Sequence[str], environment: Mapping[str, str], port: int, log_path: Path
) -> Iterator[Server]:
    """Starts ``command``, yields the server while it boots, and stops it however the block ends.

    Raises BootError if there is no such command.
    """
    with log_path.open("wb") as file:
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own group: Ctrl-C reaches us first, we stop it whole
            )
        except OSError as error:
            raise BootError(f"cannot start {command[0]}: {error.strerror}") from error
    server = Server(f"http://127.0.0.1:{port}", ServerLog(log_path), process, started)
    try:
        yield server
    finally:
        server.stop()


def await_boots(
    servers: Sequence[Server], timeout_s: float, on_wait: Callable[[float], None]
) -> dict[int, str]:
    """Waits until each server answers or has failed.

    Args:
        timeout_s: for each server, from its start.
        on_wait: called with the seconds of waiting so far.

    Returns:
        Why a server did not come up, by its place in ``servers``. It is stopped then.
    """
    failures: dict[int, str] = {}
    begun = time.monotonic()
    while True:
        waiting = False
        for place, server in enumerate(servers):
            if place in failures:
                continue
            try:
                if not server.is_up():
                    server.check_patience(timeout_s)
                    waiting = True
            except BootError as error:
                failures[place] = str(error)
                server.stop()
        if not waiting:
            return failures
        on_wait(time.monotonic() - begun)
        time.sleep(_POLL_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process group that ``process`` leads: asked first, then killed, then awaited, so
    that its GPU memory is free for the next server. A second Ctrl-C only shortens the asking."""
    group = process.pid
    try:
        _signal_group(group, signal.SIGTERM)
        _await_group(process, group, _TERM_GRACE_S)
    except KeyboardInterrupt:
        pass
    finally:
        if _group_is_alive(group):  # a group id that died may be another's by now
            _signal_group(group, signal.SIGKILL)
        _await_group(process, group, _KILL_GRACE_S)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on right now.

    Below those that Linux gives to whoever asks for any, from 32768 on: a server binds its port at
    the end of its boot, and until then other processes connect and listen. Low enough also for
    SGLang 0.5.11 - 0.5.15, which add 10000 for gRPC and refuse what is no port.
    """
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def is_healthy(url: str, timeout_s: float = 5.0) -> bool:
    """True once ``/health`` answers 200: SGLang answers 503 until its warm-up request is done."""
    return _answers_well(urllib.request.Request(f"{url}/health"), timeout_s)


def server_info(url: str, api_key: str | None, timeout_s: float = 30.0) -> dict[str, Any]:
    """``/server_info`` (``/get_server_info`` on old releases); empty if neither answers."""
    for path in ("/server_info", "/get_server_info"):
        try:
            request = urllib.request.Request(url + path, headers=_key(api_key))
            with _open(request, timeout=timeout_s) as response:
                info = json.load(response)
            return info if isinstance(info, dict) else {}
        except (urllib.error.URLError, OSError, ValueError):
            continue
    return {}


def freeze_gc(url: str, api_key: str | None, timeout_s: float = 30.0) -> bool:
    """Leaves what the server's processes hold by now out of every later garbage collection.

    A full collection of SGLang's HTTP process takes about 0.5 s, at a moment that depends on all
    that was allocated before. A wave of requests that it meets reaches the scheduler in two parts.
    From 0.5.18 on SGLang does this itself after its warm-up. False if the server refuses.
    """
    request = urllib.request.Request(f"{url}/freeze_gc", headers=_key(api_key), method="POST")
    return _answers_well(request, timeout_s)


def _key(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _answers_well(request: urllib.request.Request, timeout_s: float) -> bool:
    try:
        with _open(request, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _death_notice(process: subprocess.Popen[bytes], log: ServerLog) -> str:
    code = process.poll()
    if code is None:
        status = "the server no longer answers /health"
    elif code < 0:
        status = f"the server was killed by {signal.Signals(-code).name}"
    else:
        status = f"the server exited with code {code}"
    return f"{first_cause(log.content())} ({status})"


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _await_group(process: subprocess.Popen[bytes], group: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        process.poll()  # reaps the leader; its orphans are init's to reap
        if not _group_is_alive(group):
            return
        time.sleep(0.05)


def _group_is_alive(group: int) -> bool:
    """Zombies do not count: where init does not reap, they stay for ever."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
