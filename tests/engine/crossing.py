"""Requests in flight while the server goes to target-only and back."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from sglang_servers import REQUEST_TIMEOUT_S, Server

from testbed import engine, prompts
from testbed.demo.server_log import SPECULATING, TARGET_ONLY, Switch, parse

THRESHOLD = 4
CAPACITY = 16384
"""KV slots."""
CROSSING: dict[str, Any] = {
    "speculative_disable_batch_threshold": THRESHOLD,
    "max_total_tokens": CAPACITY,
    # small enough that a prompt of some hundred tokens is prefilled in pieces
    "chunked_prefill_size": 128,
    "decode_log_interval": 1,
    "enable_metrics": True,
}
"""Flags of the servers that cross."""
# the spec-v2 worker of 0.5.11 puts drafts one position late, with us or without
LATE = engine.OVERLAP and engine.installed_release() == "0.5.11"
ACCEPTED = 1.7 if LATE else 2.5
"""What the accept length of a warm draft exceeds, at every topk."""
LEAD = 24
"""Tokens that the long requests have before the burst comes: they speculate by then."""

Body = dict[str, Any]


class LoadMissed(AssertionError):
    """Requests did not overlap as their test needs them to, so it could not look at the server."""


def need(overlap: bool, otherwise: str) -> None:
    """Fail with `LoadMissed` unless the requests were in flight together as intended."""
    if not overlap:
        raise LoadMissed(otherwise)


def greedy_body(ids: Sequence[int], tokens: int, **extra: Any) -> Body:
    """`tokens` greedy tokens after `ids`; extra: fields of the request beside sampling_params."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, **extra}


class Stream:
    """One streamed ``/generate`` request that runs in a thread from its creation on."""

    def __init__(self, server: Server, body: Body) -> None:
        self.body = body
        self.chunks: list[dict[str, Any]] = []
        """As they came; each holds the whole output so far."""
        self._server = server
        self._news = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, tokens: int) -> None:
        """Return once the request has `tokens` output tokens; fail if it ends before."""
        with self._news:
            reached = self._news.wait_for(
                lambda: self._ended or self._tokens() >= tokens, REQUEST_TIMEOUT_S
            )
        assert reached and self._tokens() >= tokens, (
            f"the request ended after {self._tokens()} of {tokens} tokens: {self._error}"
        )

    def join(self) -> None:
        self._thread.join(REQUEST_TIMEOUT_S)
        assert self._ended, "the stream does not end"

    def answer(self) -> dict[str, Any]:
        """The last chunk, after the end of the stream; raises what ended it otherwise."""
        self.join()
        if self._error is not None:
            raise self._error
        return self.chunks[-1]

    def _tokens(self) -> int:
        return self.chunks[-1]["meta_info"]["completion_tokens"] if self.chunks else 0

    def _read(self) -> None:
        try:
            body = {**self.body, "stream": True}
            with self._server.client.stream("POST", "/generate", json=body) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if line.startswith("data: ") and data != "[DONE]":
                        with self._news:
                            self.chunks.append(json.loads(data))
                            self._news.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()


@dataclass
class Crossing:
    """What came of it, in the order of the requests; log: the server's lines of that time."""

    long: list[Stream]
    burst: list[Stream]
    log: list[str] = field(default_factory=list, repr=False)

    def wait_for_burst(self, tokens: int) -> None:
        """Return once each request of it has that many: on a busy machine they come one by one."""
        for stream in self.burst:
            stream.wait_for(tokens)

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [stream.answer() for stream in self.long + self.burst]

    def lines(self, mode: str) -> list[str]:
        """The log of the steps in `mode`, up to the last request's end."""
        kept, current = [], SPECULATING
        for line in self.log:
            event = parse(line)
            if isinstance(event, Switch):
                current = event.new_mode
            elif current == mode:
                kept.append(line)
        return kept

    def resumed_at(self) -> int:
        """Index in `log` of the last switch back to speculating."""
        return max(
            i for i, line in enumerate(self.log) if f"{TARGET_ONLY} -> {SPECULATING}" in line
        )


def cross(
    server: Server,
    long: Sequence[Body],
    burst: Sequence[Body],
    *,
    during: Callable[[Crossing], None] | None = None,
) -> Crossing:
    """Run `long` alone, `burst` on top of it from their `LEAD`-th token on, and wait for all.

    Args:
        long: at most `THRESHOLD` requests, long enough to outlive the burst.
        burst: short requests, enough to exceed the threshold together.
        during: called once the burst has been sent.

    Fails unless the server's log shows both switches, each with requests in flight: the one to
    target-only under the burst, and then the one back while something still decodes.
    """
    seen = len(server.log())
    crossing = Crossing([Stream(server, body) for body in long], [])
    for stream in crossing.long:
        stream.wait_for(LEAD)
    crossing.burst = [Stream(server, body) for body in burst]
    if during is not None:
        during(crossing)
    for stream in crossing.burst + crossing.long:
        stream.join()
    crossing.log = server.log()[seen:].splitlines()
    modes = [event.new_mode for event in map(parse, crossing.log) if isinstance(event, Switch)]
    both = TARGET_ONLY in modes and SPECULATING in modes[modes.index(TARGET_ONLY) :]
    need(both, f"no crossing both ways in this log: {modes}")
    return crossing


def language_bodies(
    count: int, tokens: int, *, first_seed: int, name: str | None = None
) -> list[Body]:
    """Greedy requests whose answer is `expected_ids`; with a name, each has a `fresh_rid` of it."""
    bodies = [greedy_body(prompts.prompt_ids(first_seed + i), tokens) for i in range(count)]
    if name is not None:
        for body in bodies:
            body["rid"] = fresh_rid(name)
    return bodies


def fresh_rid(name: str) -> str:
    """A request id that no other request has had.

    Some seconds after a stream SGLang aborts its id once more, which a second request of the same
    id, as in a test that is run again, would not survive.
    """
    return f"{name}-{uuid.uuid4().hex}"


def expected_ids(body: Body) -> list[int]:
    """What the language says to a request of `language_bodies`."""
    return prompts.continue_ids(body["input_ids"], body["sampling_params"]["max_new_tokens"])


def assert_language(crossing: Crossing) -> None:
    """Every answer is the language's own continuation of its prompt."""
    for stream in crossing.long + crossing.burst:
        written, expected = stream.answer()["output_ids"], expected_ids(stream.body)
        assert written == expected, f"differs from token {first_difference(written, expected)} on"


def first_difference(written: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip_longest(written, expected)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def ask_all(server: Server, bodies: Sequence[Body]) -> list[dict[str, Any]]:
    """The answers of a server that need not cross anything, all in flight together."""
    return [stream.answer() for stream in [Stream(server, body) for body in bodies]]
