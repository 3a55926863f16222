"""A small process that behaves like an SGLang server seen from outside: log, processes, HTTP.

    python fake_sglang.py SCENARIO.json --port 31000

The scenario is a list of steps, done in order:

    {"write": "text\\n"}                    to stdout; "\\r" and the like as they are
    {"replay": "boot.log", "seconds": 2}   a recorded log, spread over this time
    {"sleep": 0.5}
    {"scheduler": "TP3"}                   start a child that calls itself sglang::scheduler_TP3
    {"kill": "TP3"}                        SIGKILL that child
    {"listen": true}                       open the port
    {"health": 503}                        what /health answers from now on; 0 never answers
    {"generate": "ok"}                     or "hang", "empty", "error", "odd", "unauthorized"
    {"stuck_dp_rank": 1}                   this data-parallel rank never answers
    {"info": {"dp_size": 2}}               what /server_info answers
    {"hang": true}                         do nothing for ever
    {"spin": true}                         the same, with a busy CPU
    {"exit": 0}

Extra arguments are accepted, as a real command line has them. Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
CHILD = f"""
import ctypes, time
libc = ctypes.CDLL(None)
libc.prctl({PR_SET_PDEATHSIG}, 9)
libc.prctl({PR_SET_NAME}, b"sglang::schedul")
time.sleep(600)
"""


class State:
    """What HTTP answers at the moment."""

    def __init__(self) -> None:
        self.health = 503
        self.generate = "ok"
        self.stuck_dp_rank: int | None = None
        self.info: dict[str, Any] = {"version": "0.5.23", "dp_size": 1}


class Handler(BaseHTTPRequestHandler):
    state: State

    def do_GET(self) -> None:
        if self.path in ("/health", "/health_generate"):
            if self.state.health == 0:
                time.sleep(600)
            self._answer(self.state.health, b"")
        elif self.path == "/server_info":
            self._answer(200, json.dumps(self.state.info).encode())
        else:
            self._answer(404, b"")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = self.state.generate
        rank = request.get("routed_dp_rank", request.get("data_parallel_rank"))
        if mode == "hang" or (rank is not None and rank == self.state.stuck_dp_rank):
            time.sleep(600)
        if mode == "unauthorized" and "Authorization" not in self.headers:
            self._answer(401, b"{}")
        elif mode == "odd":
            self._answer(200, b'{"meta_info": [1, 2]}')
        elif mode == "error":
            self._answer(500, b'{"error": "scheduler is gone"}')
        elif self.path == "/encode":
            self._answer(200, json.dumps({"embedding": [0.1], "meta_info": {}}).encode())
        else:
            tokens = 0 if mode == "empty" else 1
            body = {"text": "x" * tokens, "meta_info": {"completion_tokens": tokens}}
            self._answer(200, json.dumps(body).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, form: str, *values: object) -> None:
        say(f'[2026-03-01 12:00:00] INFO:     127.0.0.1:50000 - "{values[0]}" {values[1]}\n')


def say(text: str) -> None:
    os.write(1, text.encode())


def replay(path: Path, seconds: float) -> None:
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    for line in lines:
        os.write(1, line)
        time.sleep(seconds / max(len(lines), 1))


def spin() -> None:
    while True:
        sum(range(10000))


def perform(steps: list[dict[str, Any]], port: int, folder: Path) -> None:
    state = State()
    children: dict[str, subprocess.Popen[bytes]] = {}
    for step in steps:
        (verb, value), *more = step.items()
        if verb == "write":
            say(value)
        elif verb == "replay":
            replay(folder / value, dict(more).get("seconds", 0))
        elif verb == "sleep":
            time.sleep(value)
        elif verb == "scheduler":
            name = f"sglang::scheduler_{value}"
            children[value] = subprocess.Popen([name, "-c", CHILD], executable=sys.executable)
        elif verb == "kill":
            children[value].send_signal(signal.SIGKILL)
        elif verb == "listen":
            handler = type("Bound", (Handler,), {"state": state})
            server = ThreadingHTTPServer(("127.0.0.1", port), handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        elif verb in ("health", "generate", "stuck_dp_rank"):
            setattr(state, verb, value)
        elif verb == "info":
            state.info |= value
        elif verb == "hang":
            time.sleep(600)
        elif verb == "spin":
            spin()
        elif verb == "exit":
            for child in children.values():
                child.kill()
            os._exit(value)
        else:
            raise SystemExit(f"unknown step {verb!r}")


def die_with_parent() -> None:
    """Tests that fail must not leave servers behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--outlive-parent", action="store_true")
    known, _ = parser.parse_known_args()
    if not known.outlive_parent:
        die_with_parent()
    perform(json.loads(known.scenario.read_text()), known.port, known.scenario.parent)


if __name__ == "__main__":
    main()
