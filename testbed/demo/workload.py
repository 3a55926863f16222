"""What the demo asks of a server, and the client that asks it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from testbed import prompts
from testbed.demo import DemoError

THRESHOLD = 4
BURST = 8
_PROMPT_TOKENS = 32
_SILENCE_S = 120.0


class _BadAnswer(Exception):
    pass


@dataclass(frozen=True)
class Request:
    seed: int
    max_new_tokens: int


@dataclass(frozen=True)
class Phase:
    """Requests sent at the same time, or one after another."""

    name: str
    requests: tuple[Request, ...]
    together: bool = False


_LONE = tuple(Request(seed, 270 + 30 * seed) for seed in range(1, BURST - THRESHOLD + 1))
_SHORT = tuple(Request(seed, 60 + 10 * (seed % 10)) for seed in range(100, 100 + THRESHOLD))

PHASES = (
    Phase("lone requests", _LONE),
    # The short ones end first: then the batch is back at the threshold with the lone requests'
    # twins in flight. Only these can show whether the draft was kept warm, since a request that
    # comes after the resume brings a draft cache of its own.
    Phase(f"burst of {BURST}", _LONE + _SHORT, together=True),
    Phase("lone requests again", _LONE),
)


@dataclass
class Answers:
    """What one phase's requests have got so far. Times are seconds of the monotonic clock.

    arrivals: time and number of new tokens, one pair per streamed piece. ends: when a request was
    complete. output_ids: one list per request, in the phase's order, once all are complete.
    """

    start: float = field(default_factory=time.monotonic)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    output_ids: list[list[int]] = field(default_factory=list)


async def run_phase(url: str, phase: Phase, answers: Answers) -> None:
    """Sends the phase's requests, streaming, and fills `answers` as tokens come.

    Raises DemoError if the server refuses, falls silent for two minutes or goes away.
    """

    def arrived(new_tokens: int) -> None:
        answers.arrivals.append((time.monotonic(), new_tokens))

    async def one(request: Request) -> list[int]:
        ids = await _stream(session, url, request, arrived)
        answers.ends.append(time.monotonic())
        return ids

    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            if phase.together:
                answers.output_ids = list(await asyncio.gather(*map(one, phase.requests)))
            else:
                answers.output_ids = [await one(request) for request in phase.requests]
    except asyncio.TimeoutError:
        raise DemoError(f"{phase.name}: no token for {_SILENCE_S:.0f} s") from None
    except aiohttp.ClientError as error:
        raise DemoError(f"{phase.name}: the server stopped answering ({error})") from None
    except _BadAnswer as error:
        raise DemoError(f"{phase.name}: {error}") from None


async def _stream(
    session: aiohttp.ClientSession, url: str, request: Request, arrived: Callable[[int], None]
) -> list[int]:
    body = {
        "input_ids": prompts.prompt_ids(request.seed, _PROMPT_TOKENS),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": request.max_new_tokens,
            "ignore_eos": True,
        },
        "stream": True,
    }
    ids: list[int] = []
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200:
            raise _BadAnswer(f"the server answered {response.status}: {await response.text()}")
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            piece = json.loads(data)
            if "error" in piece:
                raise _BadAnswer(f"the server answered {piece['error']}")
            # Each piece repeats the output from its beginning.
            arrived(len(piece["output_ids"]) - len(ids))
            ids = piece["output_ids"]
    if len(ids) != request.max_new_tokens:
        raise _BadAnswer(
            f"asked for {request.max_new_tokens} tokens, the stream ended after {len(ids)}"
        )
    return ids
