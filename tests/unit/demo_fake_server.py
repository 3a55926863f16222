"""Stands in for SGLang's server in test_demo.py: its log lines, its streams, its switches.

`demo_fake_server.py PORT MODE FAULT`: MODE is ``plain`` or ``switching`` (threshold 4, accept
length 4); FAULT is one of `FAULTS`.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

THRESHOLD = 4
FAULTS = ("none", "never-switches", "cold-after-resume", "wrong-token", "dies", "hangs", "refuses")


@dataclass(eq=False)
class Request:
    seed: int
    left: int
    done: int = 0
    pieces: queue.Queue[list[int] | None] = field(default_factory=queue.Queue)


def log(text: str) -> None:
    print(f"[2026-01-01 00:00:00] {text}", flush=True)


class Scheduler:
    """One step gives every running request 4 tokens while speculating, else 1."""

    def __init__(self, speculates: bool, fault: str) -> None:
        self._speculates = speculates
        self._fault = fault
        self._target_only = False
        self._resumed = False
        self.arrived: queue.Queue[Request] = queue.Queue()

    def run(self) -> None:
        running: list[Request] = []
        while True:
            # Requests that a client sends together must run together, however slow the machine.
            while True:
                try:
                    running.append(self.arrived.get(timeout=0.05))
                except queue.Empty:
                    if running:
                        break
            while running:
                self._step(running)
                running = [request for request in running if request.left]

    def _step(self, running: list[Request]) -> None:
        batch = len(running)
        above = batch > THRESHOLD
        if self._fault == "dies" and above:
            os._exit(3)
        if self._speculates and self._fault != "never-switches" and above != self._target_only:
            old, new = ("speculating", "target-only")[:: 1 if above else -1]
            log(
                f"spec-ext switch: {old} -> {new}, batch={batch}, N={THRESHOLD}, M={THRESHOLD}, "
                "steps since last switch=9"
            )
            self._target_only, self._resumed = above, not above
        speculating = self._speculates and not self._target_only
        cold = self._fault == "cold-after-resume" and self._resumed and batch > 1
        width = 1 if not speculating or cold else 4
        for request in running:
            count = min(width, request.left)
            ids = [request.seed * 1000 + i for i in range(request.done, request.done + count)]
            if self._fault == "wrong-token" and self._resumed:
                ids[0] += 1
            request.done += count
            request.left -= count
            request.pieces.put(ids)
            if not request.left:
                request.pieces.put(None)
        accept = f"accept len: {width:.2f}, accept rate: 1.00, " if speculating else ""
        log(f"Decode batch, #running-req: {batch}, #token: 9, {accept}#queue-req: 0")
        time.sleep(0.001)


def handler(scheduler: Scheduler) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/generate" and body["stream"] is True
            request = Request(body["input_ids"][0], body["sampling_params"]["max_new_tokens"])
            scheduler.arrived.put(request)
            self.send_response(200)
            self.end_headers()
            ids: list[int] = []
            while (new := request.pieces.get()) is not None:
                ids += new
                self.wfile.write(b"data: " + json.dumps({"output_ids": ids}).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # the default of 5 makes a burst wait for a second try to connect


def main() -> None:
    port, mode, fault = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    log("server_args={}")
    if fault == "refuses":
        print("Traceback (most recent call last):\nValueError: no such flag", flush=True)
        sys.exit(2)
    if fault == "hangs":
        time.sleep(600)
    scheduler = Scheduler(mode == "switching", fault)
    threading.Thread(target=scheduler.run, daemon=True).start()
    server = Server(("127.0.0.1", port), handler(scheduler))
    log("The server is fired up and ready to roll!")
    server.serve_forever()


if __name__ == "__main__":
    main()
