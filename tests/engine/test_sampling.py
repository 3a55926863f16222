"""What decides about tokens besides the target's logits, across both switches."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from crossing import (
    Body,
    Crossing,
    ask_all,
    assert_language,
    cross,
    greedy_body,
    language_bodies,
    need,
)
from sglang_servers import Server

from testbed import engine, prompts

LONG = 320
SHORT = 24

# The language does not say what follows fewer than 16 words: the target's probabilities are then
# spread over all words, so that a wrong one shows.
OPEN = 6


def open_bodies(count: int, tokens: int, *, first_seed: int, **sampling: Any) -> list[Body]:
    bodies = [greedy_body(prompts.prompt_ids(first_seed + i, OPEN), tokens) for i in range(count)]
    for body in bodies:
        body["sampling_params"] |= sampling
    return bodies


def only_off(answer: dict[str, Any]) -> bool:
    """Whether no verify has touched the request: its decode steps were all target-only."""
    return not answer["meta_info"].get("spec_verify_ct")


# --------------------------------------------------------------------------------- grammar
SCHEMA = {
    "type": "object",
    "properties": {
        "day": {"enum": ["Monday", "Tuesday"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["day", "count"],
    "additionalProperties": False,
}
LINE = r"( (rock|paper|north|one)){60}\."
SHORT_LINE = r"( (red|two|March)){12}!"


def test_grammars_hold_in_both_modes(crossing_server: Server, plain_server: Server) -> None:
    long = open_bodies(1, LONG, first_seed=400, regex=LINE)
    long += open_bodies(1, LONG, first_seed=401, json_schema=json.dumps(list_of(40)))
    burst = open_bodies(3, 60, first_seed=410, json_schema=json.dumps(SCHEMA))
    burst += open_bodies(2, 60, first_seed=420, regex=SHORT_LINE)
    burst += language_bodies(3, SHORT, first_seed=430)
    for body in [*long, *burst[:5]]:
        body["sampling_params"]["ignore_eos"] = False
    crossing = cross(crossing_server, long, burst)
    assert_same_output(crossing, plain_server)
    texts = [answer["text"] for answer in crossing.answers]
    assert re.fullmatch(LINE, texts[0])
    assert len(json.loads(texts[1])) == 40
    for text in texts[2:5]:
        value = json.loads(text)
        assert value["day"] in ("Monday", "Tuesday")
        assert value["count"] in range(10)
    assert all(re.fullmatch(SHORT_LINE, text) for text in texts[5:7])


def list_of(length: int) -> dict[str, Any]:
    item = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "array", "items": item, "minItems": length, "maxItems": length}


# -------------------------------------------------------------------------------- logprobs
def test_logprobs_are_the_targets(crossing_server: Server, plain_server: Server) -> None:
    wanted = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [260, 290]}
    long = open_bodies(2, LONG, first_seed=440)
    burst = open_bodies(5, SHORT, first_seed=450) + open_bodies(1, 1, first_seed=460)
    for body in long + burst:
        body |= wanted
    # requests with and without share a batch
    burst += language_bodies(2, SHORT, first_seed=470)
    crossing = cross(crossing_server, long, burst)
    expected = assert_same_output(crossing, plain_server)
    for body, got, right in zip(long + burst, crossing.answers, expected, strict=True):
        if "return_logprob" not in body:
            continue
        for kind in KINDS:
            assert len(got["meta_info"][kind]) == body["sampling_params"]["max_new_tokens"]
            assert_close(flat(got["meta_info"][kind]), flat(right["meta_info"][kind]))


KINDS = ["output_token_logprobs", "output_top_logprobs"]
if not engine.FIRST_RELEASE:  # whose verify leaves these out
    KINDS.append("output_token_ids_logprobs")


def flat(logprobs: Any) -> list[tuple[float, int]]:
    """(log probability, token id) of nested lists of [log probability, token id, text]."""
    if logprobs and not isinstance(logprobs[0], list):
        return [(logprobs[0], logprobs[1])]
    return [pair for part in logprobs for pair in flat(part)]


def assert_close(got: list[tuple[float, int]], expected: list[tuple[float, int]]) -> None:
    assert [token for _, token in got] == [token for _, token in expected]
    assert max(abs(a - b) for (a, _), (b, _) in zip(got, expected, strict=True)) < 1e-4


# ------------------------------------------------------------------------------- penalties
def test_penalties_are_exact_while_off(crossing_server: Server, plain_server: Server) -> None:
    """While speculating, SGLang itself counts one token per verify into the penalties, not each.

    So only requests that never met a verify are the target's own; a target-only step must count
    every token.
    """
    penalties = [
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.3, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    ]
    if engine.FIRST_RELEASE:  # which knows no repetition penalty
        penalties = [p for p in penalties if "repetition_penalty" not in p] * 2
    long = language_bodies(2, LONG, first_seed=480)
    burst = []
    for i, penalty in enumerate(penalties * 2):
        burst += open_bodies(1, SHORT, first_seed=490 + i, **penalty)
    crossing = cross(crossing_server, long, burst)
    expected = ask_all(plain_server, burst)
    free = ask_all(plain_server, [without_penalties(body) for body in burst])
    compared = 0
    for stream, right, unpenalised in zip(crossing.burst, expected, free, strict=True):
        assert right["output_ids"] != unpenalised["output_ids"], "this penalty changes nothing"
        if only_off(stream.answer()):
            assert stream.answer()["output_ids"] == right["output_ids"]
            compared += 1
    need(compared >= 5, f"{compared} requests came and went while off")
    for stream in crossing.long:
        assert stream.answer()["output_ids"] == prompts.continue_ids(stream.body["input_ids"], LONG)


def without_penalties(body: Body) -> Body:
    kept = {k: v for k, v in body["sampling_params"].items() if "penalty" not in k}
    return {**body, "sampling_params": kept}


# -------------------------------------------------------------------------------- sampling
SAMPLES = 240
DRAWS = 4
"""Tokens per request; the first comes from its prefill, and is not judged."""
OUTCOMES = {290: 30.0, 300: 30.9, 310: 31.6}
"""Token ids and their logit bias: nothing else comes out, and these with uneven probabilities."""
EVEN = dict.fromkeys(OUTCOMES, 30.0)


def sampled_body(
    prompt: list[int], tokens: int, bias: dict[int, float], temperature: float = 1.0
) -> Body:
    body = greedy_body(prompt, tokens)
    biases = {str(token): value for token, value in bias.items()}
    body["sampling_params"] |= {"temperature": temperature, "logit_bias": biases}
    return body


def test_samples_have_the_targets_distribution(
    crossing_server: Server, plain_server: Server
) -> None:
    prompt = prompts.prompt_ids(500, OPEN)
    expected = conditional_distributions(plain_server, prompt)

    def surprise(bias: dict[int, float], temperature: float = 1.0) -> float:
        """How far SAMPLES requests in a crossing are from what is expected."""
        answers: list[dict[str, Any]] = []
        many = sampled_body(prompt, DRAWS, bias, temperature)
        many["input_ids"] = [prompt] * SAMPLES
        crossing = cross(
            crossing_server,
            language_bodies(2, 3 * LONG, first_seed=510),
            [],
            during=lambda _: answers.extend(crossing_server.generate(**many)),
        )
        assert_language(crossing)
        drawn = [answer["output_ids"] for answer in answers if only_off(answer)]
        need(len(drawn) > 0.8 * SAMPLES, f"{len(drawn)} samples were drawn while off")
        return chi_square_excess(drawn, expected)

    assert surprise(OUTCOMES) < 6
    # what a sampler that always takes the likeliest token, or takes any token, would do
    assert surprise(OUTCOMES, temperature=0.0) > 20
    assert surprise(EVEN) > 20


Context = tuple[int, ...]


def conditional_distributions(plain: Server, prompt: list[int]) -> dict[Context, dict[int, float]]:
    """The target's probability of each outcome, by the tokens drawn before it."""
    contexts: list[Context] = [()]
    for _ in range(DRAWS - 1):
        contexts += [(*context, token) for context in contexts for token in OUTCOMES]
    contexts = list(dict.fromkeys(contexts))
    bodies = [sampled_body([*prompt, *context], 1, OUTCOMES) for context in contexts]
    for body in bodies:
        body |= {"return_logprob": True, "top_logprobs_num": len(OUTCOMES)}
    distributions = {}
    for context, answer in zip(contexts, ask_all(plain, bodies), strict=True):
        (top,) = answer["meta_info"]["output_top_logprobs"]
        distributions[context] = {token: math.exp(logprob) for logprob, token, _ in top}
        assert set(distributions[context]) == set(OUTCOMES)
    return distributions


def chi_square_excess(drawn: list[list[int]], expected: dict[Context, dict[int, float]]) -> float:
    """Pearson's statistic over all contexts, in standard deviations above its mean."""
    counts: dict[Context, Counter[int]] = {}
    for tokens in drawn:
        for place in range(1, DRAWS):
            counts.setdefault(tuple(tokens[:place]), Counter())[tokens[place]] += 1
    statistic, freedom = 0.0, 0
    for context, seen in counts.items():
        total = sum(seen.values())
        cells = [(seen[token], total * p) for token, p in expected[context].items()]
        if min(mean for _, mean in cells) < 4:
            continue  # seen too rarely for the approximation
        statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
        freedom += len(cells) - 1
    assert freedom >= 6
    return (statistic - freedom) / math.sqrt(2 * freedom)


def assert_same_output(crossing: Crossing, plain: Server) -> list[dict[str, Any]]:
    """Ids, text and finish reason of every request; returns the target's own answers."""
    streams = crossing.long + crossing.burst
    expected = ask_all(plain, [stream.body for stream in streams])
    for stream, right in zip(streams, expected, strict=True):
        got = stream.answer()
        assert got["output_ids"] == right["output_ids"]
        assert got["text"] == right["text"]
        assert got["meta_info"]["finish_reason"] == right["meta_info"]["finish_reason"]
    return expected


def test_unconstrained_neighbours_are_untouched(crossing_server: Server) -> None:
    """One request's sampling settings must not spill over to another row of the batch."""
    long = language_bodies(2, LONG, first_seed=530)
    burst = language_bodies(4, SHORT, first_seed=540)
    odd = open_bodies(4, SHORT, first_seed=550, temperature=5.0, repetition_penalty=1.5)
    crossing = cross(crossing_server, long, burst + odd)
    crossing.burst = crossing.burst[:4]
    assert_language(crossing)
