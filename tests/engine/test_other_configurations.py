"""The same crossing on servers that are set up differently, one boot each.

The KV pool's fullness is checked when each test is over; a leak between requests would have ended
the server, since SGLang's own check is strict here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from crossing import (
    ACCEPTED,
    CAPACITY,
    CROSSING,
    THRESHOLD,
    Body,
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
from probing import Faults, pool_gap, verifies
from sglang_servers import LAUNCH_SERVER, SGLANG_SERVE, Server, Servers

from testbed import engine, prompts

LONG = 240
SHORT = 24


@dataclass(frozen=True)
class Configuration:
    name: str
    topk: int
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    program: Sequence[str] = LAUNCH_SERVER
    warmth: str = "KV-only writes"
    """What the log says keeps the draft warm."""

    @property
    def on_first_release(self) -> bool:
        return not {"page_size", "disable_overlap_schedule"} & set(self.flags)

    def __str__(self) -> str:
        return self.name


NO_RADIX = {"disable_radix_cache": True}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
OVERLAP = engine.environment(overlap=True)
OVERLAP_ON = {"disable_overlap_schedule": False}
# Two of the four doors are tried on the way.
THROUGH_ENV = {"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": str(THRESHOLD)}
NO_FLAG = {"speculative_disable_batch_threshold": None}

# Pages need Triton's interpreter, as overlap does: a bookkeeping kernel has no other form for them.
PAGES = Configuration(
    "page size 16 and overlap, topk 1, sglang serve",
    1,
    {"page_size": 16, **OVERLAP_ON},
    OVERLAP,
    SGLANG_SERVE,
)
CONFIGURATIONS = [
    # topk > 1 with pages is refused by the only attention backend that runs on CPU
    PAGES,
    Configuration("no radix cache, topk 1, env door", 1, NO_RADIX | NO_FLAG, THROUGH_ENV),
    Configuration("retraction, topk 1", 1, {}, RETRACT),
    Configuration("retraction and no radix cache, topk 4", 4, NO_RADIX, RETRACT),
    Configuration("overlap, topk 4", 4, OVERLAP_ON, OVERLAP),
    Configuration(
        "standalone",
        1,
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(engine.TARGET),
        },
        warmth="SGLang's draft extend on every step (a STANDALONE draft is a whole language model)",
    ),
    Configuration(
        "EAGLE-1, topk 4",
        4,
        engine.EAGLE1,
        warmth="SGLang's draft extend on every step (LlamaForCausalLMEagle is not one of ",
    ),
]


@pytest.fixture(params=CONFIGURATIONS, ids=str, scope="module")
def configuration(request: pytest.FixtureRequest) -> Configuration:
    """Of module scope, so that the tests are grouped by it."""
    value: Configuration = request.param
    if engine.FIRST_RELEASE and not value.on_first_release:
        pytest.skip("needs the spec-v2 worker or pages")
    return value


@pytest.fixture
def server(engines: Servers, configuration: Configuration, faults: Faults) -> Iterator[Server]:
    env = configuration.env | faults.environment()
    flags = CROSSING | configuration.flags
    server = engines.get(configuration.topk, env=env, program=configuration.program, **flags)
    yield server
    assert pool_gap(server, CAPACITY) is None


def test_crossing(server: Server, configuration: Configuration) -> None:
    """Short and tiny requests, a stop string, a grammar, a prompt in pieces and an abort."""
    long = language_bodies(2, LONG, first_seed=800)
    burst = language_bodies(3, SHORT, first_seed=810)
    burst += [greedy_body(prompts.prompt_ids(820 + i), i) for i in (1, 2)]
    burst.append(greedy_body(prompts.prompt_ids(830, 300), SHORT))
    special = [stopping(840), constrained(850), greedy_body(prompts.prompt_ids(860), LONG)]
    special[-1]["rid"] = fresh_rid("to-be-aborted")

    def abort(crossing: Any) -> None:
        crossing.burst[-1].wait_for(SHORT // 2)
        server.client.post("/abort_request", json={"rid": special[-1]["rid"]}).raise_for_status()

    crossing = cross(server, long, burst + special, during=abort)
    stopped, grammatical, aborted = (s.answer() for s in crossing.burst[len(burst) :])
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
    assert re.fullmatch(GRAMMAR, grammatical["text"])
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    written = aborted["output_ids"]
    assert written == expected_ids(special[-1])[: len(written)]
    crossing.burst = crossing.burst[: len(burst)]
    assert_language(crossing)

    if configuration.env == RETRACT:
        assert retractions(crossing) >= 3
    active = [line for line in server.log().splitlines() if "spec-ext active" in line]
    assert len(active) == 1 and f"N={THRESHOLD}," in active[0]
    assert f"draft kept warm by {configuration.warmth}" in active[0]


def retractions(crossing: Crossing) -> int:
    if engine.FIRST_RELEASE:  # it does not tell them by request
        return len(re.findall(r"#retracted_reqs: [1-9]", "\n".join(crossing.log)))
    return sum(answer["meta_info"]["num_retractions"] for answer in crossing.answers)


GRAMMAR = r"( (red|two|March)){8}!"


def constrained(seed: int) -> Body:
    body = greedy_body(prompts.prompt_ids(seed, 6), 60)
    body["sampling_params"] |= {"regex": GRAMMAR, "ignore_eos": False}
    return body


def stopping(seed: int) -> Body:
    body = greedy_body(prompts.prompt_ids(seed), 4 * SHORT)
    words = prompts.text_of(expected_ids(body)).split()
    body["sampling_params"]["stop"] = [" ".join(words[18:21])]
    return body


def test_acceptance_after_resume(server: Server, configuration: Configuration) -> None:
    """As that of the same text in a request that comes alone, and so never goes target-only."""
    long = language_bodies(2, LONG, first_seed=870, name="warm")
    crossing = cross(server, long, language_bodies(6, SHORT, first_seed=880))
    assert_language(crossing)
    for body in long:
        resumed = verifies(crossing.log[crossing.resumed_at() :], body["rid"])
        need(bool(resumed), "a long request had ended before the last resume")
        if configuration.env == RETRACT:
            # interrupted by prefills, which make the draft new
            assert sum(n for _, n in resumed) / len(resumed) > ACCEPTED
            continue
        server.flush_cache()
        position = resumed[0][0]
        text = [*body["input_ids"], *expected_ids(body)]
        again = greedy_body(text[:position], len(text) - position, rid=body["rid"] + "-again")
        seen = len(server.log())
        Stream(server, again).answer()
        alone = verifies(server.log()[seen:].splitlines(), again["rid"])
        assert resumed == alone
        assert sum(n for _, n in alone) / len(alone) > ACCEPTED


@pytest.mark.parametrize("configuration", [PAGES], ids=str, indirect=True)
def test_prefix_in_whole_pages_is_reused_warm(server: Server) -> None:
    first, *others = language_bodies(6, 3 * SHORT, first_seed=900)
    cross(server, language_bodies(1, LONG, first_seed=910), [first, *others])
    prefix = [*first["input_ids"], *expected_ids(first)]
    found = []
    for name in ("reused", "alone"):
        body = greedy_body(prefix, LONG, rid=fresh_rid("pages"))
        seen = len(server.log())
        answer = Stream(server, body).answer()
        assert answer["output_ids"] == expected_ids(body)
        if name == "reused":
            assert answer["meta_info"]["cached_tokens"] >= len(prefix) - 2 * 16
        found.append(verifies(server.log()[seen:].splitlines(), body["rid"]))
        server.flush_cache()
    assert found[0] == found[1]
