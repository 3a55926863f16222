"""The load: C requests in flight on ``/generate``, streamed, each replaced when it finishes.

An own client rather than ``sglang.bench_serving``: that one needs a tokenizer (often a network for
it, and it cannot drive a server that runs with --skip-tokenizer-init), knows no steady state, and
moved to another module between 0.5.9 and 0.5.23. aiohttp rather than httpx: every SGLang release
brings it, and it costs less CPU per streamed chunk, on a machine that the server needs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_spec_ext.ops.bench.figures import Trace

try:
    import aiohttp
except ImportError as error:  # pragma: no cover - SGLang itself requires aiohttp
    raise ImportError(
        "the benchmark client needs aiohttp: pip install 'sglang-spec-ext[bench]'"
    ) from error


class LoadError(RuntimeError):
    """A request failed, so the level has no figures; the message says what the server answered."""


@dataclass(frozen=True)
class Client:
    """Talks to one server. url: without a trailing slash. timeout_s: longest silence of a
    request, queueing included."""

    url: str
    api_key: str | None
    stream_interval: int
    timeout_s: float

    def run(
        self,
        prompts: Sequence[dict[str, Any]],
        concurrency: int,
        output_tokens: int,
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[Trace]:
        """Sends every prompt, ``concurrency`` at a time. Raises LoadError at the first failure."""
        return asyncio.run(self._run(prompts, concurrency, output_tokens, on_finish))

    async def _run(
        self,
        prompts: Sequence[dict[str, Any]],
        concurrency: int,
        output_tokens: int,
        on_finish: Callable[[], None],
    ) -> list[Trace]:
        waiting = iter(prompts)
        traces: list[Trace] = []

        async def keep_one_in_flight(session: aiohttp.ClientSession) -> None:
            for prompt in waiting:  # shared: each prompt is taken once
                traces.append(await self._generate(session, prompt, output_tokens))
                on_finish()

        async with self._session() as session:
            await self._flush_cache(session)
            slots = [asyncio.ensure_future(keep_one_in_flight(session)) for _ in range(concurrency)]
            try:
                await asyncio.gather(*slots)
            finally:
                for slot in slots:
                    slot.cancel()
                await asyncio.gather(*slots, return_exceptions=True)
        return traces

    async def _generate(
        self, session: aiohttp.ClientSession, prompt: dict[str, Any], output_tokens: int
    ) -> Trace:
        body = {
            **prompt,
            "stream": True,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": output_tokens,
                "ignore_eos": True,
                "stream_interval": self.stream_interval,
            },
        }
        trace = Trace(start=time.perf_counter())
        last: dict[str, Any] = {}
        try:
            async with session.post(f"{self.url}/generate", json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise LoadError(f"/generate answered HTTP {response.status}: {text}")
                async for line in response.content:
                    event = _event(line)
                    if event is None:
                        continue
                    last = event["meta_info"]
                    tokens = last["completion_tokens"]
                    if tokens > (trace.tokens if trace.chunks else 0):
                        trace.chunks.append((time.perf_counter(), tokens))
        except (aiohttp.ClientError, asyncio.TimeoutError, KeyError, ValueError) as error:
            raise LoadError(f"a request broke off: {error!r}") from error
        trace.end = time.perf_counter()
        trace.verify_steps = last.get("spec_verify_ct")
        if not trace.chunks or trace.tokens != output_tokens:
            got = trace.tokens if trace.chunks else 0
            raise LoadError(
                f"a request ended after {got} of {output_tokens} output tokens "
                f"(finish_reason {last.get('finish_reason')}); do prompt and output fit the "
                "server's --context-length?"
            )
        return trace

    async def _flush_cache(self, session: aiohttp.ClientSession) -> None:
        """Prompts of a level before must not shorten this one's prefill. Servers that forbid it
        (admin key) or lack it still give valid decode figures, so a refusal is no failure."""
        try:
            async with session.post(f"{self.url}/flush_cache") as response:
                await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise LoadError(f"the server does not answer: {error!r}") from error

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self.timeout_s),
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else None,
            read_bufsize=2**22,  # a line holds all output ids so far
        )


def _event(line: bytes) -> dict[str, Any] | None:
    """The JSON of one server-sent event, None for other lines. Raises LoadError for an error."""
    if not line.startswith(b"data:"):
        return None
    data = line[len(b"data:") :].strip()
    if data == b"[DONE]":
        return None
    event = json.loads(data)
    if "error" in event:
        raise LoadError(f"the server refused a request: {json.dumps(event['error'])[:300]}")
    reason = event["meta_info"].get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise LoadError(f"the server aborted a request: {reason.get('message')}")
    return event
