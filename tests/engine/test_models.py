"""The tiny pair on the real engine: it speculates well, and what it says is the target's own."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sglang_servers import Server

from testbed import prompts

TOKENS = 300


# The first two as everywhere, so that these tests share engines with those of other files.
pytestmark = pytest.mark.parametrize(
    "topk", [1, 4, None], ids=["topk1", "topk4", "plain"], indirect=True, scope="session"
)


@pytest.fixture
def server(request: pytest.FixtureRequest, topk: int | None) -> Server:
    name = "plain_server" if topk is None else "static_server"
    server: Server = request.getfixturevalue(name)
    return server


def test_greedy_output_follows_the_language_at_every_batch_size(server: Server) -> None:
    for batch in range(1, 9):
        starts = [prompts.prompt_ids(seed=100 * batch + i) for i in range(batch)]
        answers = server.greedy(starts, TOKENS if batch in (1, 8) else 60)
        for start, answer in zip(starts, answers, strict=True):
            written = answer["output_ids"]
            assert written == prompts.continue_ids(start, len(written))


def test_long_contexts_follow_the_language(server: Server) -> None:
    start = prompts.prompt_ids(seed=5, length=940)
    (answer,) = server.greedy([start], 84)
    assert answer["output_ids"] == prompts.continue_ids(start, 84)


def test_drafts_are_mostly_accepted(server: Server, topk: int | None) -> None:
    starts = [prompts.prompt_ids(seed) for seed in range(8)]
    answers = server.greedy(starts, TOKENS)
    if topk is None:
        assert not any("spec_verify_ct" in answer["meta_info"] for answer in answers)
        return
    verifies = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    accept_length = len(starts) * TOKENS / verifies
    assert {1: 3.0, 4: 3.4}[topk] < accept_length < 4.0, "rejections must occur, but be rare"


def test_text_and_ids_are_the_same_prompt(server: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 32}
    answer = server.generate(text=prompts.prompt_text(7), sampling_params=sampling)
    expected = prompts.continue_ids(prompts.prompt_ids(7), 32)
    assert answer["meta_info"]["prompt_tokens"] == prompts.ORDER
    assert answer["output_ids"] == expected
    assert answer["text"].split() == prompts.text_of(expected).split()


def test_stop_string_ends_the_text(server: Server) -> None:
    following = prompts.text_of(prompts.continue_ids(prompts.prompt_ids(7), 32)).split()
    stop = following[20]
    sampling = {"temperature": 0, "max_new_tokens": 32, "stop": [stop]}
    answer = server.generate(text=prompts.prompt_text(7), sampling_params=sampling)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["text"].split() == following[: following.index(stop)]


def test_json_schema_constrains_the_output(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {
            "day": {"enum": ["Monday", "Tuesday"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["day", "count"],
        "additionalProperties": False,
    }
    sampling = {"temperature": 0, "max_new_tokens": 80, "json_schema": json.dumps(schema)}
    answer = server.generate(text=prompts.prompt_text(3), sampling_params=sampling)
    value = json.loads(answer["text"])
    assert value["day"] in ("Monday", "Tuesday")
    assert 0 <= value["count"] <= 9
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_no_kv_slot_is_left_behind(server: Server) -> None:
    held = 0
    with ThreadPoolExecutor(1) as background:
        running = background.submit(server.greedy, [prompts.prompt_ids(9)], 600)
        while not running.done():
            held = max(held, server.tokens_held())
            time.sleep(0.05)
    assert len(running.result()[0]["output_ids"]) == 600
    assert held > 0, "the count does not see a running request"
    assert server.tokens_leaked() == 0
