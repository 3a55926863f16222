"""Requests in flight across both switches: what comes out is what the target alone says.

The KV pool's fullness is checked after each test by the fixture of the server.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from crossing import (
    CAPACITY,
    LEAD,
    THRESHOLD,
    Crossing,
    Stream,
    ask_all,
    assert_language,
    cross,
    expected_ids,
    fresh_rid,
    greedy_body,
    language_bodies,
)
from probing import Faults, pool_gap
from sglang_servers import Server

from testbed import prompts

LONG = 500
SHORT = 24


def test_greedy_output_is_the_targets(crossing_server: Server) -> None:
    long = language_bodies(2, LONG, first_seed=10)
    burst = language_bodies(6, SHORT, first_seed=20)
    assert_language(cross(crossing_server, long, burst))


def test_every_length_down_to_one_token(crossing_server: Server) -> None:
    """Requests of 1 and 2 tokens end with their prefill and with their first decode step."""
    long = language_bodies(2, LONG, first_seed=30)
    burst = [
        greedy_body(prompts.prompt_ids(40 + i), tokens)
        for i, tokens in enumerate((1, 2, 3, 4, 5, 21, 22, 23, 24, 1, 2))
    ]
    crossing = cross(crossing_server, long, burst)
    assert_language(crossing)
    for stream in crossing.long + crossing.burst:
        reason = stream.answer()["meta_info"]["finish_reason"]
        tokens = stream.body["sampling_params"]["max_new_tokens"]
        assert reason == {"type": "length", "length": tokens}


def test_stop_strings_end_requests_in_both_modes(
    crossing_server: Server, plain_server: Server
) -> None:
    def stopping(seed: int, at: int, tokens: int) -> dict[str, Any]:
        body = greedy_body(prompts.prompt_ids(seed), tokens)
        words = prompts.text_of(expected_ids(body)).split()
        # three words in a row: one alone comes round sooner
        body["sampling_params"]["stop"] = [" ".join(words[at : at + 3])]
        return body

    # the long ones stop after the resume, while drafts are accepted several at a time
    long = [stopping(60, 200, LONG), stopping(61, 201, LONG)]
    burst = [stopping(70 + i, 14 + i, 2 * SHORT) for i in range(6)]
    crossing = cross(crossing_server, long, burst)
    for got, wanted in zip(crossing.answers, ask_all(plain_server, long + burst), strict=True):
        assert wanted["meta_info"]["finish_reason"]["type"] == "stop"
        assert got["meta_info"]["finish_reason"] == wanted["meta_info"]["finish_reason"]
        assert got["text"] == wanted["text"]
        assert got["output_ids"] == wanted["output_ids"]


def test_aborts_in_both_modes(crossing_server: Server) -> None:
    def abort(stream: Stream) -> None:
        rid = stream.body["rid"]
        crossing_server.client.post("/abort_request", json={"rid": rid}).raise_for_status()

    def abort_three(crossing: Crossing) -> None:
        victim, last = crossing.burst[0], crossing.long[1]
        victim.wait_for(8)
        abort(victim)
        abort(crossing.long[0])
        for stream in crossing.burst:
            stream.join()
        last.wait_for(LEAD + 2 * SHORT + 40)  # speculating again, alone
        abort(last)

    long = [greedy_body(prompts.prompt_ids(80 + i), 800, rid=fresh_rid("long")) for i in range(2)]
    burst = [greedy_body(prompts.prompt_ids(90), 800, rid=fresh_rid("burst"))]
    burst += language_bodies(6, SHORT, first_seed=91)
    crossing = cross(crossing_server, long, burst, during=abort_three)
    aborted = {id(crossing.burst[0]), *map(id, crossing.long)}
    for stream in crossing.long + crossing.burst:
        answer, expected = stream.answer(), expected_ids(stream.body)
        if id(stream) in aborted:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert answer["output_ids"] == expected[: len(answer["output_ids"])] != expected
        else:
            assert answer["output_ids"] == expected


def test_requests_taken_back_while_off_lose_and_repeat_nothing(crossing_server: Server) -> None:
    """A pause retracts whatever runs; a step that was in flight must not count twice after it."""

    def pause(crossing: Crossing) -> None:
        crossing.burst[0].wait_for(8)
        client = crossing_server.client
        client.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        client.post("/continue_generation", json={}).raise_for_status()

    long = language_bodies(2, LONG, first_seed=100)
    burst = language_bodies(6, 2 * SHORT, first_seed=102)
    assert_language(cross(crossing_server, long, burst, during=pause))


def test_streams_lose_and_repeat_nothing(crossing_server: Server) -> None:
    long = language_bodies(2, LONG, first_seed=110)
    burst = language_bodies(6, SHORT, first_seed=120)
    crossing = cross(crossing_server, long, burst)
    for stream in crossing.long + crossing.burst:
        assert len(stream.chunks) > 3
        for before, after in zip(stream.chunks, stream.chunks[1:], strict=False):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert len(after["output_ids"]) == after["meta_info"]["completion_tokens"]
    assert_language(crossing)


def test_openai_stream_increments_join_to_the_text(crossing_server: Server) -> None:
    """Here each event carries only what is new, so nothing repairs a loss."""
    body = {
        "model": "default",
        "prompt": prompts.prompt_ids(130),
        "max_tokens": LONG,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    increments: list[str] = []

    def read() -> None:
        with crossing_server.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if line.startswith("data: ") and data != "[DONE]":
                    increments.extend(c["text"] for c in json.loads(data)["choices"])

    reader = threading.Thread(target=read)
    reader.start()
    long = language_bodies(1, LONG, first_seed=131)
    cross(crossing_server, long, language_bodies(6, SHORT, first_seed=140))
    reader.join(60)
    expected = prompts.text_of(prompts.continue_ids(prompts.prompt_ids(130), LONG))
    assert "".join(increments).split() == expected.split()
    assert len([text for text in increments if text]) > LONG / 4


def test_chunked_prefill_joins_in_both_modes(crossing_server: Server) -> None:
    long = [greedy_body(prompts.prompt_ids(150 + i, 200), LONG) for i in range(2)]
    burst = [greedy_body(prompts.prompt_ids(160 + i, 300), SHORT) for i in range(4)]
    burst += language_bodies(4, SHORT, first_seed=170)
    crossing = cross(crossing_server, long, burst)
    assert_language(crossing)
    whole = [line for line in crossing.log if "Prefill batch" in line and "#new-token: 128" in line]
    assert len(whole) >= 8, "no prompt was prefilled in pieces"


def test_the_scheduler_commits_a_step_while_the_next_one_runs(crossing_server: Server) -> None:
    """On the spec-v1 worker, up to the last step before the resume."""
    if "worker=EAGLEWorkerV2" in crossing_server.log():
        pytest.skip("SGLang itself overlaps the steps of this worker")
    long = language_bodies(2, LONG, first_seed=180)
    crossing = cross(crossing_server, long, language_bodies(6, SHORT, first_seed=190))
    assert_language(crossing)
    flying, most, both = 0, 0, 0
    for line in crossing.log:
        if "launched target-only step" in line:
            flying += 1
            most, both = max(most, flying), both + (flying == 2)
        elif "committed target-only step" in line:
            flying -= 1
        elif "probe: verify" in line:
            assert flying == 0, "a verify with a step in flight"
    assert (flying, most) == (0, 2)
    assert both > SHORT / 2


def test_the_log_says_what_the_command_line_asked_for(crossing_server: Server, topk: int) -> None:
    (line,) = [x for x in crossing_server.log().splitlines() if "spec-ext active" in x]
    assert f"N={THRESHOLD}, M={THRESHOLD}, K=4, max_running_requests=8" in line
    assert f"topk={topk}" in line


def test_a_leak_is_seen(crossing_server: Server, faults: Faults) -> None:
    """The check after each test here would notice a slot that a target-only step allocates."""
    with faults.on("leak"):
        cross(
            crossing_server,
            language_bodies(2, LONG, first_seed=200),
            language_bodies(6, SHORT, first_seed=210),
        )
    assert "KV slots" in (pool_gap(crossing_server, CAPACITY) or "")
    crossing_server.flush_cache()  # resets the pools
