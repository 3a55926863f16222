"""SGLang servers of the tiny pair for the engine tests, each a tree of processes of its own.

The test process imports neither torch nor SGLang: an engine under test cannot share patches,
environment or memory with the tests or with another engine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from sglang_spec_ext.compat import bootstrap
from sglang_spec_ext.ops.bench.server import free_port
from testbed import engine
from testbed.demo.processes import ProcessTree

BOOT_TIMEOUT_S = 400.0
REQUEST_TIMEOUT_S = 300.0
LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
SGLANG_SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")
IDLE_TIMEOUT_S = 20.0
LOG_NAME = "server.log"
CLOSED = {"SGLANG_PLUGINS": "none_of_ours", bootstrap.SWITCH: "0"}
"""Every way in but the diffs."""
PATCHED = "SPEC_EXT_TEST_PATCHED"
"""Folder of a patched SGLang, on which alone all servers are to run: see tests/run-0.5.9."""


class Server:
    """A running server; create it with `Server.start`, end it with `stop`."""

    def __init__(
        self, url: str, process: ProcessTree, folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        """folder: holds the log that `process` writes; removed by `stop`."""
        self.url = url
        self._process = process
        self._folder = folder
        self.client = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S)

    @classmethod
    def start(
        cls,
        topk: int | None,
        *,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = LAUNCH_SERVER,
        **flags: Any,
    ) -> Server:
        """topk and flags: as `engine.command_line`; env: variables to add; program: what to start.

        Raises RuntimeError with the end of its log if the server does not become ready.
        """
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        folder = tempfile.TemporaryDirectory(prefix="spec-ext-test-")
        command = [*program, *engine.command_line(topk, port=port, **flags)[len(LAUNCH_SERVER) :]]
        log_file = Path(folder.name, LOG_NAME)
        process = ProcessTree(command, log_file, server_environment(env or {}))
        process.__enter__()
        server = cls(url, process, folder)
        try:
            server._wait_until_ready()
        except BaseException:
            server.stop()
            raise
        return server

    def generate(self, **request: Any) -> Any:
        """The JSON answer of ``/generate``, a list for several prompts.

        request: its body, such as ``input_ids=[[...], ...]`` or ``text=...``, and
        ``sampling_params``. Raises httpx.HTTPStatusError for an answer that is an error.
        """
        response = self.client.post("/generate", json=request)
        response.raise_for_status()
        return response.json()

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
        """`tokens` greedy tokens after each prompt, all in one batch."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = self.generate(input_ids=prompts, sampling_params=sampling)
        assert isinstance(answers, list)
        return answers

    def tokens_held(self) -> int:
        """KV slots that running requests hold, a few steps old; the radix cache does not count."""
        response = self.client.get("/v1/loads")
        response.raise_for_status()
        return sum(load["num_used_tokens"] for load in response.json()["loads"])

    def tokens_leaked(self) -> int:
        """KV slots still held once the last request has ended and the server is idle.

        SGLang looks for leaks itself when it falls idle and ends the server if it finds one;
        then this raises httpx.TransportError, and the log says more.
        """
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while (held := self.tokens_held()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.flush_cache()
        return held

    def flush_cache(self) -> None:
        """Empty the radix cache, once the last request has ended.

        A client has its answer a little before the scheduler has let go of the request; until
        then SGLang answers 400. Raises httpx.HTTPStatusError if it still does after a while.
        """
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while (answer := self.client.post("/flush_cache")).status_code == 400:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        answer.raise_for_status()

    def log(self) -> str:
        """Everything that the server's processes have written so far; gone once it is stopped."""
        return Path(self._folder.name, LOG_NAME).read_text(errors="replace")

    def stop(self) -> None:
        """End all its processes and remove its log; a second call does nothing."""
        self.client.close()
        self._process.stop()
        self._folder.cleanup()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while time.monotonic() < deadline:
            status = self._process.exit_status()
            if status is not None:
                raise RuntimeError(f"the server ended with status {status}:\n{self._log_end()}")
            try:
                if self.client.get("/health_generate", timeout=30).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.3)
        raise RuntimeError(f"not ready after {BOOT_TIMEOUT_S:.0f} s:\n{self._log_end()}")

    def _log_end(self) -> str:
        return "\n".join(line[:500] for line in self.log().splitlines()[-40:])


class Servers:
    """Boots a configuration on first use and keeps the last few alive, so that tests share them."""

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._running: dict[str, Server] = {}

    def get(
        self,
        topk: int | None,
        *,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = LAUNCH_SERVER,
        **flags: Any,
    ) -> Server:
        """The server for these arguments of `Server.start`, with an empty radix cache."""
        # An idle engine must not take the CPU from the one that is at work.
        flags = {"sleep_on_idle": True, **flags}
        key = json.dumps([topk, dict(env or {}), program, flags], sort_keys=True)
        server = self._running.pop(key, None)
        if server is None:
            while len(self._running) >= self._keep:
                oldest = next(iter(self._running))
                self._running.pop(oldest).stop()
            server = Server.start(topk, env=env, program=program, **flags)
        self._running[key] = server  # last: most recently used
        server.flush_cache()
        return server

    def stop_all(self) -> None:
        while self._running:
            self._running.popitem()[1].stop()


def server_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process that runs SGLang on the test bed, with `extra` on top."""
    environment = engine.process_environment() | dict(extra)
    patched = os.environ.get(PATCHED)
    return with_site(Path(patched), environment | CLOSED) if patched else environment


def with_site(site: Path, environment: dict[str, str]) -> dict[str, str]:
    """The same with the packages in ``site`` before all others."""
    return {**environment, "PYTHONPATH": os.pathsep.join([str(site), environment["PYTHONPATH"]])}
