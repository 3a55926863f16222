"""The draft misses nothing while it is off: what it proposes after a resume is as good as ever."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import pytest
from acceptance import accept_length, after_resume, never_off, window
from crossing import (
    ACCEPTED,
    Crossing,
    Stream,
    assert_language,
    cross,
    expected_ids,
    fresh_rid,
    greedy_body,
    language_bodies,
    need,
)
from probing import Faults, verifies
from sglang_servers import Server

from testbed import engine, prompts
from testbed.demo.server_log import SPECULATING, TARGET_ONLY

LONG = 450
OFF = 30
"""Steps of an off phase; more than `prompts.ORDER`: a cold draft then misses all that it needs."""
COLD = 0.6
"""A cold draft's accept length is below this part of a warm one's."""


def cross_with_ids(server: Server, seed: int) -> Crossing:
    long = language_bodies(2, LONG, first_seed=seed, name="warm")
    return cross(server, long, language_bodies(6, OFF, first_seed=seed + 10))


def test_acceptance_after_resume_is_that_of_a_server_never_off(
    crossing_server: Server, static_server: Server
) -> None:
    """Verify by verify the same: the draft's state at a position depends on nothing else."""
    for seed in (200, 220):
        crossing = cross_with_ids(crossing_server, seed)
        assert_language(crossing)
        for stream in crossing.long:
            resumed = after_resume(crossing, stream.body)
            reference = never_off(static_server, stream.body, resumed[0][0])
            assert resumed == reference
            assert accept_length(reference) > ACCEPTED


def test_acceptance_falls_without_the_warm_write(
    crossing_server: Server, static_server: Server, faults: Faults
) -> None:
    """The test above would notice: without the KV-only write only the text stays right."""
    with faults.on("cold_draft"):
        crossing = cross_with_ids(crossing_server, 240)
    assert_language(crossing)
    for stream in crossing.long:
        cold = after_resume(crossing, stream.body)[:8]
        warm = never_off(static_server, stream.body, cold[0][0])[:8]
        assert accept_length(cold) < COLD * accept_length(warm)


def test_requests_prefilled_while_off_are_warm_too(
    crossing_server: Server, static_server: Server
) -> None:
    """One that joins under load and outlives it has spent all its life before the resume off."""
    long = language_bodies(1, 2 * LONG, first_seed=260)
    burst = language_bodies(6, 3 * OFF, first_seed=270)
    joined = greedy_body(prompts.prompt_ids(280), LONG, rid=fresh_rid("joined"))
    crossing = cross(crossing_server, long, [*burst, joined])
    assert_language(crossing)
    resumed = after_resume(crossing, joined)
    need(resumed[0][0] > prompts.ORDER + OFF / 2, "it came when the burst was almost over")
    assert resumed == never_off(static_server, joined, resumed[0][0])


def resume_with_one_just_prefilled(server: Server, seed: int) -> tuple[Crossing, dict[str, Any]]:
    """It waits for a place among eight; when the burst ends, its prefill is the last step off."""
    long = language_bodies(2, 2 * LONG, first_seed=seed)
    burst = language_bodies(6, 2 * OFF, first_seed=seed + 10)
    waiting = greedy_body(prompts.prompt_ids(seed + 19), LONG, rid=fresh_rid("waiting"))

    def send_once_full(crossing: Crossing) -> None:
        for stream in crossing.burst:
            stream.wait_for(4)
        crossing.burst.append(Stream(server, waiting))

    crossing = cross(server, long, burst, during=send_once_full)
    assert_language(crossing)
    resumes = [line.split() for line in crossing.log if "probe: resume of " in line]
    need(any(waiting["rid"] in rids for rids in resumes), "it was prefilled after the resume")
    need(after_resume(crossing, waiting)[0][0] == prompts.ORDER, "it decoded before the resume")
    return crossing, waiting


def test_request_whose_first_decode_is_the_resume(
    crossing_server: Server, static_server: Server
) -> None:
    crossing, waiting = resume_with_one_just_prefilled(crossing_server, 280)
    assert after_resume(crossing, waiting) == never_off(static_server, waiting, prompts.ORDER)


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
def test_a_resume_writes_again_what_each_last_position_holds(
    crossing_server: Server, faults: Faults, lost: bool
) -> None:
    """It has each request's own hidden state, also that of one that was just prefilled: acceptance
    would hardly show it, because the tiny draft reads little of them."""
    with ExitStack() as on:
        on.enter_context(faults.on("compare_resume"))
        if lost:
            on.enter_context(faults.on("lose_prefill"))
        crossing, _ = resume_with_one_just_prefilled(crossing_server, 2280 if lost else 1280)
    found = re.findall(r"probe: resume kv difference=(\S+)", "\n".join(crossing.log))
    difference = max(map(float, found))
    if lost:
        assert difference > 0.1, "the comparison would not notice a state that is lost"
    else:
        assert difference < 1e-5  # float32


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_prefix_generated_while_off_is_reused_warm(
    crossing_server: Server, static_server: Server, faults: Faults, cold: bool
) -> None:
    """The radix cache hands the draft's KV of a target-only phase to later requests."""
    # other prompts for each: a slot that is not written keeps what an earlier request left in it
    seed = 1300 if cold else 300
    first = greedy_body(prompts.prompt_ids(seed), 2 * OFF, rid=fresh_rid("first"))
    others = [greedy_body(prompts.prompt_ids(seed + 10 + i), 2 * OFF + i) for i in range(5)]
    long = language_bodies(1, 2 * LONG, first_seed=seed + 20)
    if cold:
        with faults.on("cold_draft"):
            crossing = cross(crossing_server, long, [first, *others])
    else:
        crossing = cross(crossing_server, long, [first, *others])
        assert_language(crossing)

    prefix = [*first["input_ids"], *expected_ids(first)]
    # it may have come and gone before the others made a burst of it
    speculated = [position for position, _ in verifies(crossing.log, first["rid"])]
    off_from = len(prefix) - prompts.ORDER
    need(max(speculated, default=0) < off_from, "it was not generated while off")
    second = greedy_body(prefix, LONG, rid=fresh_rid("reuse"))
    seen = len(crossing_server.log())
    answer = Stream(crossing_server, second).answer()
    found = window(verifies(crossing_server.log()[seen:].splitlines(), second["rid"]))
    assert answer["output_ids"] == expected_ids(second)
    assert answer["meta_info"]["cached_tokens"] >= len(prefix) - 2
    reference = never_off(static_server, second, len(prefix))
    if cold:
        assert accept_length(found[:4]) < COLD * accept_length(reference[:4])
    else:
        assert found == reference


def test_written_kv_is_that_of_sglangs_own_draft_extend(
    crossing_server: Server, faults: Faults
) -> None:
    def differences(seed: int) -> list[float]:
        crossing = cross_with_ids(crossing_server, seed)
        lines = "\n".join(crossing.log)
        return [float(m) for m in re.findall(r"probe: draft kv difference=(\S+)", lines)]

    with faults.on("compare_draft_kv"):
        found = differences(340)
        with faults.on("cold_draft"):
            unwritten = differences(1340)
    assert len(found) >= (OFF - 5) // 3  # every third step
    assert max(found) < 1e-5  # float32
    assert min(unwritten) > 0.1, "the comparison would not notice a write that does not happen"


def test_no_draft_forward_while_off(crossing_server: Server, topk: int) -> None:
    crossing = cross_with_ids(crossing_server, 360)
    off, on = (forwards(crossing.lines(mode)) for mode in (TARGET_ONLY, SPECULATING))
    # a prompt that comes in the meantime is the draft's to read as well
    assert set(off) <= {"EXTEND"}
    assert len(off) <= 6
    rows = [int(n) for n in re.findall(r"probe: draft kv rows=(\d+)", "\n".join(crossing.log))]
    assert max(rows) > 3 * 7, "rows of several steps, of 7 requests, are written together"
    of_v1 = engine.SPEC_V1 and not (engine.OVERLAP and topk == 1)
    assert {"DECODE", "DRAFT_EXTEND" if of_v1 else "DRAFT_EXTEND_V2"} <= set(on)


def forwards(lines: list[str]) -> list[str]:
    return re.findall(r"probe: draft forward (\w+)", "\n".join(lines))
