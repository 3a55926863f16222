"""Every combination that is not built is refused by name; its clean twin is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_spec_ext import refusals
from sglang_spec_ext.args import Settings, SettingsError
from sglang_spec_ext.compat import workers

FLAG = "--speculative-disable-batch-threshold"
SETTINGS = Settings(16, 16)

# As SGLang resolves a plain EAGLE-3 server.
CLEAN = {
    "speculative_algorithm": "EAGLE3",
    "speculative_adaptive": False,
    "speculative_use_rejection_sampling": False,
    "enable_multi_layer_eagle": False,
    "enable_dp_attention": False,
    "attn_dp_size": None,
    "dp_size": 1,
    "tp_size": 4,
    "pp_size": 1,
    "nnodes": 1,
    "disaggregation_mode": "null",
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_hisparse": False,
    "enable_unified_memory": False,
    "disable_overlap_schedule": False,
}

# (the arguments that bring it about, the entry of REFUSALS, the word of the fix)
CASES = [
    ({"speculative_adaptive": True}, "--speculative-adaptive", "drop one of the two"),
    (
        {"speculative_use_rejection_sampling": True},
        "--speculative-use-rejection-sampling",
        "drop it",
    ),
    ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle", "without the threshold"),
    ({"enable_dp_attention": True}, "DP attention", "--enable-dp-attention"),
    ({"attn_dp_size": 2}, "DP attention", "--attn-dp-size"),
    ({"dp_size": 2}, "--dp-size above 1", "one server per replica"),
    ({"pp_size": 2}, "--pp-size above 1", "--tp-size"),
    ({"nnodes": 2}, "--nnodes above 1", "from one node"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode", "one server"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode", "one server"),
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap", "drop it"),
    ({"enable_pdmux": True}, "--enable-pdmux", "drop it"),
    ({"enable_hisparse": True}, "--enable-hisparse", "drop it"),
    ({"enable_unified_memory": True}, "a unified memory pool", "--enable-unified-memory"),
]


UNFIT_CASES = [
    (
        workers.V1,
        "the spec-v1 worker, which this SGLang takes without the overlap schedule",
        "--speculative-eagle-topk 1",
    ),
    (
        workers.V2,
        "the spec-v2 worker, which this SGLang takes with the overlap schedule",
        "SGLANG_ENABLE_SPEC_V2=0",
    ),
]


def arguments(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**CLEAN, **changed})


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "eagle3"])
def test_a_clean_server_is_not_refused(algorithm: str) -> None:
    refusals.check(arguments(speculative_algorithm=algorithm), SETTINGS)


def test_a_release_without_the_arguments_is_not_refused() -> None:
    refusals.check(SimpleNamespace(speculative_algorithm="EAGLE"), SETTINGS)


def test_arguments_that_are_none_are_not_refused() -> None:
    nothing = dict.fromkeys(CLEAN) | {"speculative_algorithm": "EAGLE3"}
    refusals.check(SimpleNamespace(**nothing), SETTINGS)


def refused(what: str, fix: str, reason: refusals.Reason, *given: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        refusals.check(*given)
    message = str(caught.value)
    assert message.startswith(f"{FLAG} 16 does not work with {what}: {reason.why}. Fix: ")
    assert fix in message
    assert message.endswith(f"or drop {FLAG}.")


@pytest.mark.parametrize(("changed", "what", "fix"), CASES, ids=lambda v: str(v))
def test_refused_by_name(changed: dict[str, Any], what: str, fix: str) -> None:
    (refusal,) = [r for r in refusals.REFUSALS if r.what == what]
    refused(what, fix, refusal, arguments(**changed), SETTINGS)


@pytest.mark.parametrize(("unfit", "what", "fix"), UNFIT_CASES, ids=["spec-v1", "spec-v2"])
def test_a_worker_that_does_not_fit_is_refused(
    unfit: workers.Contract, what: str, fix: str
) -> None:
    refused(what, fix, refusals.UNFIT_WORKERS[unfit.worker], arguments(), SETTINGS, unfit)


def test_every_refusal_has_a_case() -> None:
    assert {what for _, what, _ in CASES} == {r.what for r in refusals.REFUSALS}
    assert {what for _, what, _ in UNFIT_CASES} == {r.what for r in refusals.UNFIT_WORKERS.values()}


@pytest.mark.parametrize(
    "refusal", [*refusals.REFUSALS, *refusals.UNFIT_WORKERS.values()], ids=lambda r: r.what
)
def test_every_refusal_says_why_and_what_to_do(refusal: refusals.Reason) -> None:
    assert refusal.why.strip()
    assert refusal.fix.strip()


@pytest.mark.parametrize("algorithm", ["NGRAM", "DFLASH", "FROZEN_KV_MTP", "NONE", "dspark"])
def test_other_algorithms_are_refused(algorithm: str) -> None:
    with pytest.raises(SettingsError) as caught:
        refusals.check(arguments(speculative_algorithm=algorithm), SETTINGS)
    message = str(caught.value)
    assert message.startswith(f"{FLAG} 16 does not work with --speculative-algorithm {algorithm}: ")
    assert message.endswith("Works with: EAGLE, EAGLE3, STANDALONE")


def test_no_algorithm_is_refused_with_an_example() -> None:
    with pytest.raises(SettingsError) as caught:
        refusals.check(arguments(speculative_algorithm=None), SETTINGS)
    message = str(caught.value)
    assert message.startswith(f"{FLAG} 16 needs a speculative algorithm")
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path" in message
