"""EAGLE-3 on target classes, most without the hooks: tiny random models of many families.

`eagle3_families.py` runs each of them in SGLang's real scheduler, plain and under EAGLE-3 with a
random draft that captures three layers, and with our hook around the load of the target. Kimi-K2.5
also crosses our threshold both ways.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eagle3_families import (
    DRAFT_IDS,
    FAMILIES,
    HIDDEN,
    LONG,
    NEW_TOKENS,
    PROMPTS,
    SHORT,
    TOPKS,
    N,
    crossing_kind,
)

from testbed import engine
from testbed.demo.server_log import SPECULATING, TARGET_ONLY, Switch, parse

Report = dict[str, dict[str, dict[str, Any]]]
BY_OTHERS = pytest.mark.skipif(engine.FIRST_RELEASE, reason="runs Kimi-K2.5 only")
CROSSING = sorted(name for name, family in FAMILIES.items() if family.crosses)
WITH_MEDIA = sorted(name for name, family in FAMILIES.items() if family.modality)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What happened, by family, then for "plain" and "eagle3". One process for all."""
    folder = tmp_path_factory.mktemp("families")
    program = Path(__file__).with_name("eagle3_families.py")
    env = engine.process_environment()
    env["PYTHONPATH"] += os.pathsep + str(program.parents[2])
    run = subprocess.run(
        [sys.executable, str(program), str(folder)],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    made: Report = json.loads((folder / "report.json").read_text())
    return made


@pytest.fixture
def ran(report: Report, family: str) -> dict[str, dict[str, Any]]:
    for kind, told in report[family].items():
        assert "error" not in told, f"{kind}: {told['error'][-3000:]}"
    return report[family]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_class_that_lacks_the_hook_is_given_it(family: str, ran: dict[str, Any]) -> None:
    native = FAMILIES[family].native
    assert ran["eagle3"]["lacked"] is not native
    assert ("set_eagle3_layers_to_capture" in ran["eagle3"]["set"]) is not native
    assert any("lacks EAGLE-3 hooks" in line for line in ran["eagle3"]["log"]) is not native


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_without_speculation_nothing_is_touched(ran: dict[str, Any]) -> None:
    plain = ran["plain"]
    assert plain["set"] == plain["replaced"] == plain["hooked"] == plain["log"] == []


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_forward_captures_what_the_draft_fuses(ran: dict[str, Any]) -> None:
    captured = ran["eagle3"]["captured"]
    assert {mode for mode, _, _ in captured} == {"EXTEND", "TARGET_VERIFY"}
    expected = [[HIDDEN] * len(DRAFT_IDS), True if engine.FIRST_RELEASE else None]
    assert [c for c in captured if c[1:] != expected] == []
    assert not any(widths for _, widths, _ in ran["plain"]["captured"])


@pytest.mark.skipif(not engine.FIRST_RELEASE, reason="later releases ask for no default layers")
def test_verify_graphs_capture_the_drafts_layers(report: Report) -> None:
    assert report["Kimi-K2.5"]["eagle3"]["graphs"] == [layer + 1 for layer in DRAFT_IDS]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_draft_borrows_the_targets_embedding(ran: dict[str, Any]) -> None:
    assert ran["eagle3"]["borrowed"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_text_is_that_of_the_target_alone(ran: dict[str, Any]) -> None:
    plain, eagle3 = ran["plain"]["text"], ran["eagle3"]["text"]
    assert [len(tokens) for tokens in plain] == [NEW_TOKENS] * len(PROMPTS)
    assert len({token for tokens in plain for token in tokens}) > 3, "too dull to compare"
    assert eagle3 == plain
    assert ran["eagle3"]["verifies"] > 0 == ran["plain"]["verifies"]


@pytest.mark.skipif(not engine.FIRST_RELEASE, reason="with topk 1 a random draft never is")
def test_that_holds_with_accepted_drafts(report: Report) -> None:
    assert report["Kimi-K2.5"]["eagle3"]["accepted"] > 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_draft_that_is_never_accepted_is_named_and_no_other(ran: dict[str, Any]) -> None:
    said = [line for line in ran["eagle3"]["log"] if "accept length is 1.00 over" in line]
    if ran["eagle3"]["accepted"] == 0:
        (line,) = said
        assert "sglang-spec-ext check-draft" in line
    assert len(said) <= 1


@pytest.mark.parametrize("family", WITH_MEDIA)
def test_so_is_text_after_an_image_or_audio(ran: dict[str, Any]) -> None:
    assert ran["eagle3"]["mixed"] == ran["plain"]["mixed"]
    # the media must have had its say, else nothing was compared
    assert ran["plain"]["mixed"] != ran["plain"]["text"]


@pytest.mark.parametrize("family", WITH_MEDIA)
def test_no_placeholder_reaches_the_drafts_embedding(ran: dict[str, Any]) -> None:
    assert ran["eagle3"]["placeholders"], "the prompt had no placeholder above the vocabulary"
    assert not set(ran["eagle3"]["draft_embeds"]) & set(ran["eagle3"]["placeholders"])


@pytest.mark.parametrize("family", WITH_MEDIA)
def test_the_draft_sees_what_the_target_sees_one_token_on(ran: dict[str, Any]) -> None:
    assert ran["eagle3"]["same"] == [True] * 2 * len(PROMPTS)


@pytest.mark.parametrize("topk", TOPKS)
@pytest.mark.parametrize("family", CROSSING)
def test_requests_in_flight_across_the_threshold_say_what_the_target_says(
    ran: dict[str, Any], topk: int
) -> None:
    """Text and images among them, in the batch that speculates and in the one that does not."""
    crossed = ran[crossing_kind(topk)]
    switches = [event for event in map(parse, crossed["log"]) if isinstance(event, Switch)]
    assert [switch.new_mode for switch in switches] == [TARGET_ONLY, SPECULATING]
    assert switches[0].batch > N >= switches[1].batch > 0
    assert {mode for mode, *_ in crossed["captured"]} == {"EXTEND", "TARGET_VERIFY", "DECODE"}

    expected = ran["plain"]["crossed"]
    assert [len(tokens) for tokens in expected] == [LONG] * 2 + [SHORT] * 4
    # the image must have had its say, else nothing was compared
    assert len({tuple(tokens[:SHORT]) for tokens in expected}) == len(expected)
    assert crossed["crossed"] == ran["eagle3"]["crossed"] == expected


@pytest.mark.parametrize("topk", TOPKS)
@pytest.mark.parametrize("family", CROSSING)
def test_the_draft_is_kept_warm_across_the_threshold(ran: dict[str, Any], topk: int) -> None:
    """Its KV cache ends up as that of a draft that was never off."""
    crossed = ran[crossing_kind(topk)]
    (active,) = [line for line in crossed["log"] if "spec-ext active" in line]
    assert f"topk={topk}" in active and "draft kept warm by KV-only writes" in active
    for kept, never_off in zip(crossed["draft_kv"], ran["eagle3"]["draft_kv"], strict=True):
        for row, expected in zip(kept, never_off, strict=True):
            assert row == pytest.approx(expected, abs=1e-4)


def test_a_wrapped_model_without_hooks_is_refused_before_weights_load(report: Report) -> None:
    error = report["a wrapped model without hooks"]["eagle3"]["error"]
    last = error.strip().splitlines()[-1]
    assert "MissingHooksError: --speculative-algorithm EAGLE3 needs the hidden states" in last
    assert "that it wraps has no set_eagle3_layers_to_capture" in last
    assert "_initialize_model(" in error and "in initialize_model" in error


@BY_OTHERS
def test_a_hook_without_effect_stops_before_anything_is_served(report: Report) -> None:
    error = report["a hook without effect"]["eagle3"]["error"]
    last = error.strip().splitlines()[-1]
    assert "CaptureError: the draft fuses 3 hidden states of width 64" in last
    assert "layers [0, 2, 4]" in last
    assert "LlavaForConditionalGeneration handed to its logits processor is none" in last


@BY_OTHERS
def test_a_loop_that_collects_nothing_is_refused_before_its_weights_load(report: Report) -> None:
    error = report["a loop that collects nothing"]["eagle3"]["error"]
    last = error.strip().splitlines()[-1]
    assert "MissingHooksError: --speculative-algorithm EAGLE3 needs the hidden states" in last
    assert "GemmaForCausalLM" in last and "would have to be rewritten" in last
    assert "load_random" not in error
