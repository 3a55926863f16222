"""Start a server so that it outlives this command, its terminal and the SSH session."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from sglang_spec_ext.ops.address import reachable
from sglang_spec_ext.ops.preflight import config_file


class LaunchError(Exception):
    """The server was not started; the message names the fix."""


@dataclass(frozen=True)
class Launched:
    """``offset`` is where this boot begins in a log that earlier boots have written to."""

    popen: subprocess.Popen[bytes]
    log: Path
    pid_file: Path
    offset: int


def launch(command: Sequence[str], log: Path) -> Launched:
    """Run ``command`` in a session of its own, output appended to ``log``, pid beside it.

    Raises LaunchError when the server of an earlier launch with this log still runs, when its port
    is taken, when the program is not found, or when the log cannot be written.
    """
    pid_file = log.with_name(log.name + ".pid")
    running = _running(pid_file)
    if running is not None:
        raise LaunchError(
            f"the server started with {log} still runs (pid {running}): wait for it with "
            f"`sglang-spec-ext wait --pid {running} --log {log}`, stop it, or choose another --log"
        )
    try:
        address = urlsplit(reachable(url_of(command)))
    except ValueError as error:
        raise LaunchError(f"--host and --port: {error}") from error
    if _answers(address.hostname or "127.0.0.1", address.port or 80):
        raise LaunchError(
            f"something already listens on {address.netloc}: find it with `ss -ltnp`, or choose "
            "another --port"
        )
    if shutil.which(command[0]) is None:
        raise LaunchError(f"{command[0]}: no such program on PATH")
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            offset = output.tell()
            popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # no hang-up and no Ctrl-C of ours reaches it
            )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]} with log {log}: {error}") from error
    pid_file.write_text(f"{popen.pid}\n", encoding="ascii")
    return Launched(popen, log, pid_file, offset)


def url_of(command: Sequence[str]) -> str:
    """Where a server started with this command will listen (SGLang's defaults otherwise)."""
    host, port = _of_config(command)
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if not equals:
            value = command[place + 1] if place + 1 < len(command) else ""
        if not value:
            continue
        if name == "--host":
            host = value
        elif name == "--port":
            port = value
    return f"http://{host}:{port}"


def _of_config(command: Sequence[str]) -> tuple[str, str]:
    """Host and port as far as a --config file says them, else SGLang's defaults.

    SGLang itself stops at a file that cannot be read, and that is what its log will say.
    """
    try:
        path, _ = config_file.take_out(command)
        values = {} if path is None else config_file.load(path)
    except config_file.ConfigError:
        values = {}
    return str(values.get("host", "127.0.0.1")), str(values.get("port", "30000"))


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def _running(pid_file: Path) -> int | None:
    """The pid in the file if that process runs and is old enough to have written it."""
    try:
        pid = int(pid_file.read_text(encoding="ascii"))
        written = pid_file.stat().st_mtime
        process = psutil.Process(pid)
        # Pids are reused: whatever started after the file was written is something else.
        runs = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return pid if runs and process.create_time() <= written + 1 else None
    except (OSError, ValueError, psutil.Error):
        return None
