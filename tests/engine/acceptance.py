"""How well the draft does after a resume, and how well it would do had it never been off."""

from __future__ import annotations

from crossing import Body, Crossing, Stream, expected_ids, greedy_body, need
from probing import verifies
from sglang_servers import Server

WINDOW = 40
"""Tokens after the resume in which the draft is judged."""

Verifies = list[tuple[int, int]]
"""(position, accept length) of each."""


def after_resume(crossing: Crossing, body: Body) -> Verifies:
    """The verifies that cover `WINDOW` tokens from the resume on."""
    return window(verifies(crossing.log[crossing.resumed_at() :], body["rid"]))


def window(found: Verifies) -> Verifies:
    need(bool(found), "the request ended before the window")
    start = found[0][0]
    kept = [(position, length) for position, length in found if position < start + WINDOW]
    need(found[-1][0] >= start + WINDOW, "the request ended within the window")
    return kept


def never_off(server: Server, body: Body, position: int) -> Verifies:
    """The same request, on a server that does not switch, from the same position on.

    What it has said before is part of the prompt here, so that verifies begin at the same token.
    """
    server.flush_cache()
    text = [*body["input_ids"], *expected_ids(body)]
    again = greedy_body(text[:position], len(text) - position)
    again["rid"] = body["rid"] + "-never-off"
    seen = len(server.log())
    Stream(server, again).answer()
    return window(verifies(server.log()[seen:].splitlines(), again["rid"]))


def accept_length(found: Verifies) -> float:
    return sum(length for _, length in found) / len(found)
