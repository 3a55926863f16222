"""Combinations of arguments, by release: each rule with a case and a clean twin."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_spec_ext.compat.releases import RELEASES
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity
from sglang_spec_ext.ops.preflight.flags import Flag, recorded
from sglang_spec_ext.ops.preflight.reading import OURS, read_arguments
from sglang_spec_ext.ops.preflight.rules import RULES, tree_pool
from sglang_spec_ext.ops.preflight.setup import Setup

DRAFT = "--speculative-draft-model-path d"
CHAIN = (
    f"--speculative-algorithm EAGLE3 {DRAFT} --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --max-running-requests 64"
)
TREE = CHAIN.replace("topk 1", "topk 4").replace("tokens 4", "tokens 16")
LLAMA = {"architectures": ["LlamaForCausalLM"]}
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"]}


def judge(
    line: str,
    release: str = "0.5.23",
    environment: dict[str, str] | None = None,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
) -> list[Finding]:
    reading = read_arguments(
        ["--model-path", "m", *line.split()], recorded(release).with_flags(OURS)
    )
    assert [f for f in reading.findings if f.severity is not Severity.NOTE] == []
    setup = Setup(release, reading, environment or {}, target or {}, draft or {})
    return [finding for rule in RULES for finding in rule(setup)]


def found(*args: Any, **more: Any) -> dict[str, Severity]:
    return {finding.id: finding.severity for finding in judge(*args, **more)}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("line", ["", CHAIN])
def test_clean_lines_are_clean_in_every_release(release: str, line: str) -> None:
    assert judge(line, release) == []


# --- the three values ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ("--speculative-num-steps 1", (1, 1, 2)),
        ("--speculative-num-steps 5", (5, 1, 6)),
        ("--speculative-eagle-topk 4", (3, 4, 16)),
        ("--speculative-eagle-topk 4 --speculative-num-draft-tokens 8", (3, 4, 8)),
        ("--speculative-num-draft-tokens 4", (3, 1, 4)),
        ("--speculative-num-steps 2 --speculative-num-draft-tokens 9", (2, 1, 3)),
        ("--speculative-num-steps 1 --speculative-eagle-topk 4", (1, 4, 5)),
    ],
)
def test_incomplete_values_are_completed(values: str, fits: tuple[int, int, int]) -> None:
    (finding,) = [
        each
        for each in judge(f"--speculative-algorithm EAGLE3 {DRAFT} {values}")
        if each.severity is Severity.ERROR
    ]
    assert finding.id == "values-incomplete"
    assert finding.fix == (
        f"for example --speculative-num-steps {fits[0]} --speculative-eagle-topk {fits[1]} "
        f"--speculative-num-draft-tokens {fits[2]}"
    )


@pytest.mark.parametrize(
    ("architecture", "chosen"),
    [("LlamaForCausalLM", "topk 4"), ("Qwen3ForCausalLM", "topk 1"), (None, "3/1/4 for most")],
)
def test_without_values_the_choice_is_told(architecture: str | None, chosen: str) -> None:
    target = {"architectures": [architecture]} if architecture else {}
    notes = judge(f"--speculative-algorithm EAGLE3 {DRAFT}", target=target)
    assert any(f.id == "values-chosen" and chosen in f.message for f in notes)


def values(steps: int, topk: int, draft: int) -> str:
    return (
        f"--speculative-algorithm EAGLE3 {DRAFT} --max-running-requests 64 --speculative-num-steps "
        f"{steps} --speculative-eagle-topk {topk} --speculative-num-draft-tokens {draft}"
    )


@pytest.mark.parametrize(
    ("three", "rule"),
    [
        ((3, 1, 4), None),  # the standard: the root counts, so it is no token too many
        ((2, 1, 2), "values-rewritten"),
        ((3, 1, 16), "values-rewritten"),
        ((3, 4, 16), None),
        ((5, 4, 64), None),
        ((3, 4, 37), None),  # exactly the pool of 36 and the root
        ((3, 4, 38), "values-impossible"),
        ((1, 8, 9), None),
        ((1, 8, 10), "values-impossible"),
        ((2, 2, 1), "values-impossible"),
        ((0, 1, 1), "values-impossible"),
    ],
)
def test_values_must_fit_each_other(three: tuple[int, int, int], rule: str | None) -> None:
    assert list(found(values(*three))) == ([rule] if rule else [])


def test_the_pool_is_the_first_level_and_topk_by_topk_below() -> None:
    assert (tree_pool(1, 8), tree_pool(3, 1), tree_pool(3, 4)) == (8, 3, 36)


# --- the draft ----------------------------------------------------------------------------------

NO_DRAFT = CHAIN.replace(DRAFT, "")


def test_a_missing_draft_is_an_error_unless_the_target_brings_one() -> None:
    assert found(NO_DRAFT)["no-draft"] is Severity.ERROR
    assert found(NO_DRAFT, target=LLAMA)["no-draft"] is Severity.ERROR
    eagle = NO_DRAFT.replace("EAGLE3", "EAGLE")
    nextn = NO_DRAFT.replace("EAGLE3", "NEXTN")
    assert found(eagle, target=DEEPSEEK) == {}
    assert found(nextn, target=DEEPSEEK) == {}
    assert found(NO_DRAFT, target=DEEPSEEK)["no-draft"] is Severity.ERROR
    assert found(eagle)["no-draft"] is Severity.WARNING
    newer = {"architectures": ["HYV4ForCausalLM"]}
    assert found(eagle, "0.5.23", target=newer) == {}
    assert found(eagle, "0.5.9", target=newer)["no-draft"] is Severity.ERROR


def test_speculative_flags_without_an_algorithm_do_nothing() -> None:
    assert found(DRAFT) == {"no-algorithm": Severity.WARNING}


@pytest.mark.parametrize(
    ("name", "release", "severity"),
    [
        ("DSPARK", "0.5.14", Severity.ERROR),
        ("DSPARK", "0.5.16", None),
        ("MY_OWN", "0.5.23", Severity.WARNING),
        ("eagle3", "0.5.23", None),
    ],
)
def test_algorithms_by_release(name: str, release: str, severity: Severity | None) -> None:
    line = CHAIN.replace("EAGLE3", name)
    assert found(line, release).get("unknown-algorithm") is severity


def test_an_mla_target_needs_a_backend_for_its_ordinary_draft() -> None:
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"]}
    llama_draft = {"architectures": ["LlamaForCausalLMEagle3"]}
    line = f"{CHAIN} --attention-backend trtllm_mla"
    assert found(line, target=kimi, draft=llama_draft)["draft-backend"] is Severity.ERROR
    assert found(CHAIN, target=kimi, draft=llama_draft)["draft-backend"] is Severity.WARNING
    mla_draft = {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    assert found(line, target=kimi, draft=mla_draft) == {}
    own = f"{line} --speculative-draft-attention-backend flashinfer"
    assert found(own, target=kimi, draft=llama_draft) == {}
    assert found(line, target=LLAMA, draft=llama_draft) == {}


# --- combinations -------------------------------------------------------------------------------

COMBINATIONS: list[tuple[str, str, str, Severity | None]] = [
    (f"{CHAIN} --enable-mixed-chunk", "0.5.17", "mixed-chunk", Severity.WARNING),
    (f"{CHAIN} --enable-mixed-chunk", "0.5.23", "mixed-chunk", Severity.WARNING),
    ("--enable-mixed-chunk", "0.5.23", "mixed-chunk", None),
    (f"{TREE} --attention-backend trtllm_mha", "0.5.23", "tree-draft", Severity.ERROR),
    (f"{CHAIN} --attention-backend trtllm_mha", "0.5.23", "tree-draft", None),
    (f"{TREE} --page-size 16 --attention-backend triton", "0.5.12.post1", "tree-pages",
     Severity.ERROR),
    (f"{TREE} --page-size 16 --attention-backend triton", "0.5.13.post1", "tree-pages", None),
    (f"{TREE} --page-size 16 --attention-backend fa3", "0.5.9", "tree-pages", None),
    (f"{TREE} --page-size 16", "0.5.23", "tree-pages", Severity.WARNING),
    (f"{TREE} --page-size 1", "0.5.23", "tree-pages", None),
    (f"{CHAIN} --page-size 16", "0.5.23", "tree-pages", None),
    (TREE, "0.5.11", "tree-draft", Severity.NOTE),
    (TREE, "0.5.13.post1", "tree-draft", None),
    (f"{TREE} --attention-backend flashmla", "0.5.23", "tree-backend", Severity.WARNING),
    (f"{TREE} --attention-backend triton", "0.5.23", "tree-backend", None),
    (f"{TREE} --speculative-adaptive", "0.5.23", "adaptive-off", Severity.WARNING),
    (f"{CHAIN} --speculative-adaptive", "0.5.23", "adaptive-off", None),
    (f"{CHAIN} --speculative-adaptive", "0.5.11", "adaptive-off", Severity.WARNING),
    (f"{CHAIN} --speculative-adaptive --disable-overlap-schedule", "0.5.11", "adaptive-off", None),
    (f"{CHAIN} --speculative-adaptive --dp-size 8 --enable-dp-attention", "0.5.17", "adaptive-off",
     Severity.WARNING),
    (f"{TREE} --speculative-use-rejection-sampling", "0.5.23", "refused", Severity.ERROR),
    (f"{CHAIN} --speculative-use-rejection-sampling", "0.5.23", "refused", None),
    (f"{CHAIN} --pp-size 2", "0.5.17", "refused", Severity.WARNING),
    (f"{CHAIN} --pp-size 2", "0.5.23", "refused", None),
]  # fmt: skip


@pytest.mark.parametrize(("line", "release", "rule", "severity"), COMBINATIONS)
def test_combinations_by_release(
    line: str, release: str, rule: str, severity: Severity | None
) -> None:
    assert found(line, release).get(rule) is severity


def test_the_old_variable_of_the_v2_worker() -> None:
    on = {"SGLANG_ENABLE_SPEC_V2": "1"}
    assert found(TREE, "0.5.9", on) == {"tree-draft": Severity.ERROR}
    assert found(CHAIN, "0.5.9", on) == {}
    (finding,) = judge(CHAIN, "0.5.23", on)
    assert finding.id == "variable-unread"
    assert "0.5.9-0.5.13.post1 read it" in finding.message


def test_variables_that_nobody_reads() -> None:
    wrong = {"SGLANG_SIMULATE_ACC_LENGTH": "2", "PATH": "x", "SGLANG_SPEC_EXT_X": "1"}
    (finding,) = judge("", environment=wrong)
    assert finding.id == "variable-unread"
    assert finding.fix == "did you mean SGLANG_SIMULATE_ACC_LEN?"
    assert judge("", environment={"SGLANG_SIMULATE_ACC_LEN": "2"}) == []


# --- our own flags and capacity -----------------------------------------------------------------

THRESHOLD = "--speculative-disable-batch-threshold"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{THRESHOLD} 4", "needs a speculative algorithm"),
        (f"{CHAIN} {THRESHOLD} -1", "whole number"),
        (f"{CHAIN} {THRESHOLD} 4 --speculative-adaptive", "--speculative-adaptive"),
        (f"{CHAIN} {THRESHOLD} 4 --speculative-resume-batch-threshold 9", "is above"),
        (f"{CHAIN} {THRESHOLD} 4 --tp 8 --dp-size 8 --enable-dp-attention", "DP attention"),
    ],
)
def test_the_plugins_own_refusals_come_early(line: str, words: str) -> None:
    (finding,) = [f for f in judge(line) if f.id == "threshold"]
    assert finding.severity is Severity.ERROR
    assert words in finding.message


V2, NO_V2 = {"SGLANG_ENABLE_SPEC_V2": "1"}, {"SGLANG_ENABLE_SPEC_V2": "0"}
NO_OVERLAP = f"{CHAIN} --disable-overlap-schedule"


@pytest.mark.parametrize(
    ("release", "line", "environment", "fits"),
    [
        ("0.5.9", CHAIN, {}, True),
        ("0.5.9", TREE, {}, True),
        ("0.5.9", NO_OVERLAP, {}, True),
        ("0.5.9", CHAIN, V2, False),
        ("0.5.9", NO_OVERLAP, V2, False),
        ("0.5.10.post1", CHAIN, {}, True),
        ("0.5.10.post1", CHAIN, V2, False),
        ("0.5.11", CHAIN, {}, True),
        ("0.5.11", CHAIN, NO_V2, True),
        ("0.5.11", NO_OVERLAP, {}, True),
        ("0.5.11", TREE, {}, True),
        ("0.5.12.post1", CHAIN, {}, True),
        ("0.5.12.post1", TREE, {}, True),
        ("0.5.13.post1", CHAIN, {}, True),
        ("0.5.23", TREE, {}, True),
    ],
)
def test_a_worker_that_has_no_target_only_step(
    release: str, line: str, environment: dict[str, str], fits: bool
) -> None:
    """As SGLang would choose it, whatever release is installed here."""
    findings = judge(f"{line} {THRESHOLD} 4", release, environment)
    said = [each.message for each in findings if each.id == "threshold"]
    assert ["the spec-v2 worker" in message for message in said] == ([] if fits else [True])


def test_who_captures_the_drafts_layers() -> None:
    """The plugin, where the server's Python loads it and nobody has switched its hooks off."""

    def has_hooks(flags: tuple[Flag, ...], environment: dict[str, str], line: str = CHAIN) -> bool:
        reading = read_arguments(line.split(), recorded("0.5.9").with_flags(flags))
        return Setup("0.5.9", reading, environment, {}, {}).has_hooks

    assert has_hooks(OURS, {})
    assert not has_hooks((), {})
    assert not has_hooks(OURS, {"SGLANG_SPEC_EXT_EAGLE3_HOOKS": "0"})
    assert not has_hooks(OURS, {"SGLANG_SPEC_EXT_EAGLE3_HOOKS": "maybe"})
    assert not has_hooks(OURS, {}, CHAIN.replace("EAGLE3", "EAGLE"))


def test_a_draft_check_that_the_plugin_would_refuse() -> None:
    assert found(f"{CHAIN} --speculative-draft-check warn") == {}
    assert found(f"{CHAIN} --speculative-draft-check no") == {"draft-check": Severity.ERROR}
    variable = {"SGLANG_SPEC_EXT_DRAFT_CHECK": "no"}
    assert found(CHAIN, environment=variable) == {"draft-check": Severity.ERROR}


def test_a_switch_of_the_hooks_that_the_plugin_would_refuse() -> None:
    assert found(CHAIN, environment={"SGLANG_SPEC_EXT_EAGLE3_HOOKS": "0"}) == {}
    wrong = {"SGLANG_SPEC_EXT_EAGLE3_HOOKS": "maybe"}
    assert found(CHAIN, environment=wrong) == {"eagle3-hooks": Severity.ERROR}


def test_the_threshold_may_come_from_the_environment() -> None:
    bad = {"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "many"}
    assert found(CHAIN, environment=bad)["threshold"] is Severity.ERROR
    good = {"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "4"}
    assert found(CHAIN, environment=good) == {}


NO_CAP = CHAIN.replace("--max-running-requests 64", "")


def test_the_hidden_cap_of_48_is_told_and_divided_by_the_workers() -> None:
    (finding,) = judge(NO_CAP)
    assert (finding.id, finding.severity) == ("running-cap", Severity.NOTE)
    assert "admits 48 requests" in finding.message
    (finding,) = judge(f"{NO_CAP} --tp 8 --dp-size 8 --enable-dp-attention", "0.5.17")
    assert "6 on each of 8 DP workers" in finding.message
    v4 = {"architectures": ["DeepseekV4ForCausalLM"]}
    (finding,) = judge(NO_CAP, target=v4)
    assert "admits 256" in finding.message
    assert judge(f"{NO_CAP} {THRESHOLD} 64") == [], "with our flag that cap is not set"


def test_a_threshold_that_can_never_fire() -> None:
    assert found(f"{CHAIN} {THRESHOLD} 64") == {"threshold-unreachable": Severity.WARNING}
    assert found(f"{CHAIN} {THRESHOLD} 63") == {}


def test_graphs_against_admission_and_threshold() -> None:
    small = f"{CHAIN} --cuda-graph-max-bs-decode 16"
    assert found(small) == {"graphs-too-small": Severity.WARNING}
    assert found(f"{CHAIN} --cuda-graph-max-bs-decode 64") == {}
    assert found(f"{CHAIN} --cuda-graph-bs-decode 1 2 64") == {}
    assert found(f"{CHAIN} --cuda-graph-max-bs 16", "0.5.9") == {
        "graphs-too-small": Severity.WARNING
    }
    both = judge(f"{small} {THRESHOLD} 32")
    assert [f.id for f in both] == ["graphs-too-small"] * 2
    assert "below the threshold 32" in both[1].message
    assert found(f"{CHAIN} --disable-cuda-graph") == {"no-graphs": Severity.WARNING}
    assert found(f"{CHAIN} --disable-cuda-graph --device cpu") == {}
