"""Combinations of arguments that are not built: refused at start, by name, before weights load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_spec_ext.args import THRESHOLD_FLAG, Settings, SettingsError
from sglang_spec_ext.compat.workers import Contract, Worker

SUPPORTED_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")


@dataclass(frozen=True)
class Reason:
    """What the threshold does not work with, why, and what to do."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class Refusal(Reason):
    """One combination, and when it applies to the resolved arguments."""

    applies: Callable[[Any], bool]


def _get(arguments: Any, name: str, default: Any = None) -> Any:
    # a release may not have the argument yet, or not any more
    return getattr(arguments, name, default)


def _attention_dp(arguments: Any) -> bool:
    return (
        bool(_get(arguments, "enable_dp_attention")) or (_get(arguments, "attn_dp_size") or 1) > 1
    )


# Where a release has two workers and the one that the arguments take is not as the step needs it.
UNFIT_WORKERS: dict[Worker, Reason] = {
    "spec-v1": Reason(
        "the spec-v1 worker, which this SGLang takes without the overlap schedule",
        "it is not as the target-only step needs it",
        "use --speculative-eagle-topk 1 with the overlap schedule on and SGLANG_ENABLE_SPEC_V2 not "
        "off, or a newer SGLang",
    ),
    "spec-v2": Reason(
        "the spec-v2 worker, which this SGLang takes with the overlap schedule",
        "here only its spec-v1 worker has a target-only step",
        "set SGLANG_ENABLE_SPEC_V2=0, which selects that one",
    ),
}

REFUSALS = (
    Refusal(
        "--speculative-adaptive",
        "both would decide how many draft tokens a step has",
        "drop one of the two",
        lambda a: bool(_get(a, "speculative_adaptive")),
    ),
    Refusal(
        "--speculative-use-rejection-sampling",
        "its draft probabilities are not kept while target-only",
        "drop it",
        lambda a: bool(_get(a, "speculative_use_rejection_sampling")),
    ),
    Refusal(
        "--enable-multi-layer-eagle",
        "its worker is another one and has no target-only step yet",
        "serve this model without the threshold",
        lambda a: bool(_get(a, "enable_multi_layer_eagle")),
    ),
    Refusal(
        "DP attention",
        "its ranks would have to agree on the mode before each step, which is not built yet",
        "drop --enable-dp-attention / --attn-dp-size",
        _attention_dp,
    ),
    Refusal(
        "--dp-size above 1",
        "the launcher cannot yet confirm that every replica has bound the hooks",
        "start one server per replica behind a router",
        lambda a: (_get(a, "dp_size") or 1) > 1,
    ),
    Refusal(
        "--pp-size above 1",
        "the target-only step does not pass hidden states between pipeline stages yet",
        "use --tp-size instead",
        lambda a: (_get(a, "pp_size") or 1) > 1,
    ),
    Refusal(
        "--nnodes above 1",
        "a node started without the flag would wait for the others for ever",
        "serve from one node",
        lambda a: (_get(a, "nnodes") or 1) > 1,
    ),
    Refusal(
        "--disaggregation-mode",
        "the target's hidden states are not transferred with the KV cache",
        "serve prefill and decode from one server",
        lambda a: _get(a, "disaggregation_mode", "null") not in (None, "null"),
    ),
    Refusal(
        "--enable-two-batch-overlap",
        "the target-only step does not split its batch",
        "drop it",
        lambda a: bool(_get(a, "enable_two_batch_overlap")),
    ),
    Refusal(
        "--enable-pdmux",
        "prefill and decode would run at once on the state of one step",
        "drop it",
        lambda a: bool(_get(a, "enable_pdmux")),
    ),
    Refusal(
        "--enable-hisparse",
        "its slot mapping is not updated by the target-only step",
        "drop it",
        lambda a: bool(_get(a, "enable_hisparse")),
    ),
    Refusal(
        "a unified memory pool",
        "its slots are virtual, and the target-only step writes to physical ones",
        "drop --enable-unified-memory",
        lambda a: bool(_get(a, "enable_unified_memory")),
    ),
)


def check(arguments: Any, settings: Settings, unfit: Contract | None = None) -> None:
    """Refuse what is not built.

    Args:
        arguments: a view of the resolved server arguments.
        unfit: what the server would run, if that is none that the step works with (see
            `workers.unfit`).

    Raises:
        SettingsError: naming our flag, the argument, the reason and what to do.
    """
    flag = f"{THRESHOLD_FLAG} {settings.threshold}"
    algorithm = _get(arguments, "speculative_algorithm")
    if algorithm is None:
        raise SettingsError(
            f"{flag} needs a speculative algorithm, and none is given. Example: "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT {flag}"
        )
    if str(algorithm).upper() not in SUPPORTED_ALGORITHMS:
        raise SettingsError(
            f"{flag} does not work with --speculative-algorithm {algorithm}: its worker has no "
            f"target-only step yet. Works with: {', '.join(SUPPORTED_ALGORITHMS)}"
        )
    worker = None if unfit is None else UNFIT_WORKERS[unfit.worker]
    reason = worker or next((each for each in REFUSALS if each.applies(arguments)), None)
    if reason is not None:
        raise SettingsError(
            f"{flag} does not work with {reason.what}: {reason.why}. "
            f"Fix: {reason.fix}, or drop {THRESHOLD_FLAG}."
        )
