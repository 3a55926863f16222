"""Stands in for an SGLang server under ``bench``: its endpoints, its log lines, its admission cap.

Throughput in its log is nominal (a formula, no clock), so what ``bench`` concludes from the log is
the same on a slow machine. `off` decodes 500 tokens/s per request; `on` accepts 2 tokens per step
but its steps grow with the batch, so that it is faster up to a batch of 4.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CROSSOVER = 4
FAULTS = (
    "none",
    "crashes-at-boot",
    "adaptive-crashes-at-boot",
    "never-healthy",
    "dies-under-load",
    "refuses-requests",
    "stops-early",
    "hangs-at-two",
    "ignores-sigterm",
    "refuses-to-freeze",
)


@dataclass(eq=False)
class Request:
    wanted: int
    interval: int
    done: int = 0
    sent: int = 0
    steps: int = 0
    chunks: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


def log(text: str) -> None:
    print(f"[2026-01-01 00:00:00] {text}", flush=True)


class Scheduler:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.received = 0
        self._queued = 0
        self._target_only = False
        self._steps = 0

    @property
    def speculates(self) -> bool:
        return self.options.speculative_algorithm is not None and not self._target_only

    async def run(self) -> None:
        while True:
            self._admit()
            if not self.running:
                await asyncio.sleep(0.001)
                continue
            self._switch()
            await asyncio.sleep(0.002)
            self._step()

    def _admit(self) -> None:
        free = self.options.max_running_requests - len(self.running)
        admitted, self.waiting = self.waiting[:free], self.waiting[free:]
        # As SGLang's: what found no place, not what came since and is about to be admitted.
        self._queued = len(self.waiting)
        if admitted:
            log(f"Prefill batch, #new-seq: {len(admitted)}, #new-token: 8, cuda graph: False")
        for request in admitted:
            self._emit(request, 1)
        self.running += admitted

    def _switch(self) -> None:
        threshold = self.options.speculative_disable_batch_threshold
        if threshold is None or (len(self.running) > threshold) == self._target_only:
            return
        names = ("speculating", "target-only")
        before, after = names[self._target_only], names[not self._target_only]
        self._target_only = not self._target_only
        log(
            f"spec-ext switch: {before} -> {after}, batch={len(self.running)}, N={threshold}, "
            f"M={threshold}, steps since last switch=9"
        )

    def _step(self) -> None:
        self._steps += 1
        if self._steps % self.options.decode_log_interval == 0:
            self._log_decode()
        for request in list(self.running):
            request.steps += self.speculates
            self._emit(request, 2 if self.speculates else 1)
            if request.done >= request.wanted:
                self.running.remove(request)
        if self.options.fake_fault == "dies-under-load" and self._steps == 40:
            log("Scheduler hit an exception: Traceback (most recent call last):")
            print('  File "scheduler.py", line 1, in run', flush=True)
            print("RuntimeError: fake kernel failed", flush=True)
            os._exit(1)

    def _emit(self, request: Request, tokens: int) -> None:
        request.done = min(request.done + tokens, request.wanted)
        if self.options.fake_fault == "hangs-at-two" and len(self.running) > 1:
            request.done = 1
            return
        if request.done == request.wanted or request.done - request.sent >= request.interval:
            request.sent = request.done
            request.chunks.put_nowait(request.done)

    def _log_decode(self) -> None:
        batch = len(self.running)
        slowdown = 2 / CROSSOVER * batch if self.speculates else 1.0
        per_request = 500 * (2 if self.speculates else 1) / max(slowdown, 1.0)
        accept = "accept len: 2.00, accept rate: 0.50, " if self.speculates else ""
        on_graph = batch <= self.options.cuda_graph_max_bs
        log(
            f"Decode batch, #running-req: {batch}, #token: 9, token usage: 0.00, {accept}"
            f"cuda graph: {on_graph}, gen throughput (token/s): {batch * per_request:.2f}, "
            f"#queue-req: {self._queued}"
        )


class Endpoints:
    def __init__(self, options: argparse.Namespace, scheduler: Scheduler) -> None:
        self._options = options
        self._scheduler = scheduler
        self._born = time.monotonic()

    async def health(self, request: web.Request) -> web.Response:
        if self._options.fake_fault == "never-healthy" or time.monotonic() - self._born < 0.1:
            return web.Response(status=503)
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        options = self._options
        return web.json_response(
            {
                "version": "0.0.fake",
                "model_path": options.model_path,
                "attention_backend": "triton",
                "speculative_algorithm": options.speculative_algorithm,
                "speculative_adaptive": options.speculative_adaptive,
                "internal_states": [
                    {"effective_max_running_requests_per_dp": options.max_running_requests}
                ],
            }
        )

    async def flush_cache(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.")

    async def freeze_gc(self, request: web.Request) -> web.Response:
        key = self._options.api_key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401, text="wrong key")
        if self._options.fake_fault == "refuses-to-freeze":
            return web.Response(status=403, text="wants the admin key")
        log(f"Freezing GC before request {self._scheduler.received + 1}")
        return web.Response(text="Garbage collection frozen.")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        key = self._options.api_key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401, text="wrong key")
        body = await request.json()
        if self._options.fake_fault == "refuses-requests":
            return web.json_response({"error": {"message": "no tokenizer"}}, status=400)
        assert body["input_ids"] or body["text"]
        settings = body["sampling_params"]
        wanted = settings["max_new_tokens"]
        if self._options.fake_fault == "stops-early":
            wanted -= 1
        job = Request(wanted, settings["stream_interval"])
        self._scheduler.waiting.append(job)
        self._scheduler.received += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while job.sent < job.wanted or not job.chunks.empty():
            tokens = await job.chunks.get()
            await response.write(b"data: " + self._event(job, tokens) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, job: Request, tokens: int) -> bytes:
        meta: dict[str, Any] = {"completion_tokens": tokens, "finish_reason": None}
        if tokens == job.wanted:
            meta["finish_reason"] = {"type": "length", "length": tokens}
        if self._options.speculative_algorithm is not None:
            meta["spec_verify_ct"] = job.steps
        event = {"output_ids": [1] * tokens, "meta_info": meta}
        return web.json_response(event).body  # type: ignore[return-value]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-path", default="model")
    parser.add_argument("--api-key")
    parser.add_argument("--decode-log-interval", type=int, default=40)
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--cuda-graph-max-bs", type=int, default=64)
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-num-steps", type=int)
    parser.add_argument("--speculative-disable-batch-threshold", type=int)
    parser.add_argument("--speculative-adaptive", action="store_true")
    parser.add_argument("--fake-fault", choices=FAULTS, default="none")
    parser.add_argument("--fake-pids", help="start a child; append its pid and ours to this file")
    return parser.parse_args(argv)


def crash() -> None:
    print("Traceback (most recent call last):")
    print('  File "model.py", line 7, in load')
    print("ValueError: fake checkpoint is broken")
    sys.exit(1)


async def serve(options: argparse.Namespace) -> None:
    scheduler = Scheduler(options)
    endpoints = Endpoints(options, scheduler)
    app = web.Application()
    app.router.add_get("/health", endpoints.health)
    app.router.add_get("/server_info", endpoints.server_info)
    app.router.add_post("/flush_cache", endpoints.flush_cache)
    app.router.add_post("/freeze_gc", endpoints.freeze_gc)
    app.router.add_post("/generate", endpoints.generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    log("Capture target decode CUDA graph end. elapsed=1.50 s, mem usage=0.25 GB, avail mem=9 GB.")
    if options.speculative_disable_batch_threshold is not None:
        n = options.speculative_disable_batch_threshold
        log(f"spec-ext active: N={n}, M={n}, K=4, max_running_requests=64")
    log("The server is fired up and ready to roll!")
    await scheduler.run()


def main() -> None:
    options = parse(sys.argv[1:])
    if options.fake_pids:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(options.fake_pids, "a") as file:
            file.write(f"{os.getpid()}\n{child.pid}\n")
    if options.fake_fault == "crashes-at-boot":
        crash()
    if options.fake_fault == "adaptive-crashes-at-boot" and options.speculative_adaptive:
        crash()
    if options.fake_fault == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
