"""Two tensor-parallel ranks: each decides for itself, so both must decide the same in each step.

On CPU they talk over gloo. A rank that spoke of another batch or mode than the other would hang the
server or write nonsense: here the collectives are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from acceptance import accept_length, after_resume, never_off
from crossing import (
    ACCEPTED,
    CAPACITY,
    CROSSING,
    THRESHOLD,
    assert_language,
    cross,
    language_bodies,
)
from probing import Faults, M, N, change, our_state, pool_gap, rank_of, states_by_rank
from sglang_servers import Server, Servers

from sglang_spec_ext.compat import workers
from sglang_spec_ext.compat.contracts import in_use
from testbed import engine

RANKS = 2
LONG, SHORT = 240, 30


@pytest.fixture
def server(engines: Servers, faults: Faults) -> Iterator[Server]:
    env = faults.environment() | engine.TWO_RANKS
    server = engines.get(1, env=env, tp_size=RANKS, **CROSSING)
    yield server
    assert pool_gap(server, CAPACITY) is None
    assert {rank_of(line) for line in our_lines(server)} == {0}, "one rank speaks for both"


def our_lines(server: Server) -> list[str]:
    return [x for x in server.log().splitlines() if "spec-ext" in x and "spec-ext probe:" not in x]


def said_by_rank(log: list[str]) -> list[list[str]]:
    """What each rank's worker did: its verifies, draft forwards and rows of draft KV, in order."""
    said: list[list[str]] = [[] for _ in range(RANKS)]
    for line in log:
        _, probe, done = line.partition("spec-ext probe: ")
        if probe and not done.startswith("state "):
            said[rank_of(line)].append(done)
    return said


def test_both_ranks_cross_in_the_same_steps_and_say_what_the_target_says(server: Server) -> None:
    states_by_rank(server, RANKS)  # once both have told it, both have written all that is before
    seen = len(server.log())
    long = language_bodies(2, LONG, first_seed=1500, name="ranks")
    crossing = cross(server, long, language_bodies(6, SHORT, first_seed=1510, name="ranks"))
    assert_language(crossing)

    one, other = states_by_rank(server, RANKS)
    assert one == other
    assert one["plugin"]["switches"]["target-only"] > 0 < one["plugin"]["resumes"]
    first, second = said_by_rank(server.log()[seen:].splitlines())
    assert first == second
    for kind in ("verify", "draft forward", "draft kv"):
        assert any(line.startswith(kind) for line in first), f"no {kind}"


def test_acceptance_after_resume_is_that_of_a_draft_never_off(server: Server) -> None:
    long = language_bodies(2, LONG, first_seed=1520, name="ranks")
    crossing = cross(server, long, language_bodies(6, SHORT, first_seed=1530))
    for body in long:
        resumed = after_resume(crossing, body)
        # alone it never exceeds N, and the cache is empty: no draft KV of a target-only phase
        reference = never_off(server, body, resumed[0][0])
        assert resumed == reference
        assert accept_length(reference) > ACCEPTED


def test_hooks_are_bound_on_both_ranks(server: Server) -> None:
    expected = sorted(point.target for point in in_use(workers.contract().scheduler))
    assert [sorted(state["replaced"]) for state in states_by_rank(server, RANKS)] == (
        [expected] * RANKS
    )
    assert len([line for line in our_lines(server) if "spec-ext active" in line]) == 1


def settings_by_rank(server: Server) -> list[tuple[Any, ...]]:
    """(N, M, K) of each rank."""
    names = ("threshold", "resume_threshold", "min_steps")
    plugins = [state["plugin"] for state in states_by_rank(server, RANKS)]
    return [tuple(plugin[name] for name in names) for plugin in plugins]


def test_the_threshold_moves_on_both_ranks_or_on_none(server: Server) -> None:
    seen = len(our_lines(server))
    try:
        assert change(server, **{N: 3, M: 2}).json() == [True]
        assert settings_by_rank(server) == [(3, 2, 4)] * RANKS
        state = our_state(server)
        assert (state["threshold"], state["resume_threshold"]) == (3, 2)

        for bad, reason in (({N: 2.5}, "2.5 is not a whole number"), ({M: 9}, f"9 is above {N} 3")):
            answer = change(server, **bad)
            assert answer.status_code == 400 and reason in answer.text
            assert settings_by_rank(server) == [(3, 2, 4)] * RANKS
            assert all(reason in s["plugin"]["refused"] for s in states_by_rank(server, RANKS))

        # requests in flight cross the new N, still in step
        long = language_bodies(2, LONG, first_seed=1540)
        crossing = cross(server, long, language_bodies(2, SHORT, first_seed=1550))
        assert_language(crossing)
        assert any("speculating -> target-only, batch=4, N=3" in line for line in crossing.log)
    finally:
        assert change(server, **{N: THRESHOLD, M: THRESHOLD}).json() == [True]
    assert settings_by_rank(server) == [(THRESHOLD, THRESHOLD, 4)] * RANKS
    told = [line for line in our_lines(server)[seen:] if "switch:" not in line]
    assert ["changes nothing" in line for line in told] == [False, True, True, False]
