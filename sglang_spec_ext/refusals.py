"""Combinations of arguments that are not built: refused at start, by name, before weights load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_spec_ext.args import THRESHOLD_FLAG, Settings, SettingsError
from sglang_spec_ext.compat import workers

SUPPORTED_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")


@dataclass(frozen=True)
class Refusal:
    """One combination: when it applies to the resolved arguments, why, and what to do."""

    what: str
    applies: Callable[[Any], bool]
    why: str
    fix: str


def _get(arguments: Any, name: str, default: Any = None) -> Any:
    # a release may not have the argument yet, or not any more
    return getattr(arguments, name, default)


def _attention_dp(arguments: Any) -> bool:
    return (
        bool(_get(arguments, "enable_dp_attention")) or (_get(arguments, "attn_dp_size") or 1) > 1
    )


def _unfit_worker(kind: str) -> Callable[[Any], bool]:
    def applies(arguments: Any) -> bool:
        unfit = workers.unfit(arguments)
        return unfit is not None and unfit.worker == kind

    return applies


REFUSALS = (
    Refusal(
        "the spec-v1 worker, which this SGLang takes without the overlap schedule",
        _unfit_worker("spec-v1"),
        "it is not as the target-only step needs it",
        "use --speculative-eagle-topk 1 with the overlap schedule on and SGLANG_ENABLE_SPEC_V2 not "
        "off, or a newer SGLang",
    ),
    Refusal(
        "the spec-v2 worker, which this SGLang takes with the overlap schedule",
        _unfit_worker("spec-v2"),
        "here only its spec-v1 worker has a target-only step",
        "set SGLANG_ENABLE_SPEC_V2=0, which selects that one",
    ),
    Refusal(
        "--speculative-adaptive",
        lambda a: bool(_get(a, "speculative_adaptive")),
        "both would decide how many draft tokens a step has",
        "drop one of the two",
    ),
    Refusal(
        "--speculative-use-rejection-sampling",
        lambda a: bool(_get(a, "speculative_use_rejection_sampling")),
        "its draft probabilities are not kept while target-only",
        "drop it",
    ),
    Refusal(
        "--enable-multi-layer-eagle",
        lambda a: bool(_get(a, "enable_multi_layer_eagle")),
        "its worker is another one and has no target-only step yet",
        "serve this model without the threshold",
    ),
    Refusal(
        "DP attention",
        _attention_dp,
        "its ranks would have to agree on the mode before each step, which is not built yet",
        "drop --enable-dp-attention / --attn-dp-size",
    ),
    Refusal(
        "--dp-size above 1",
        lambda a: (_get(a, "dp_size") or 1) > 1,
        "the launcher cannot yet confirm that every replica has bound the hooks",
        "start one server per replica behind a router",
    ),
    Refusal(
        "--pp-size above 1",
        lambda a: (_get(a, "pp_size") or 1) > 1,
        "the target-only step does not pass hidden states between pipeline stages yet",
        "use --tp-size instead",
    ),
    Refusal(
        "--nnodes above 1",
        lambda a: (_get(a, "nnodes") or 1) > 1,
        "a node started without the flag would wait for the others for ever",
        "serve from one node",
    ),
    Refusal(
        "--disaggregation-mode",
        lambda a: _get(a, "disaggregation_mode", "null") not in (None, "null"),
        "the target's hidden states are not transferred with the KV cache",
        "serve prefill and decode from one server",
    ),
    Refusal(
        "--enable-two-batch-overlap",
        lambda a: bool(_get(a, "enable_two_batch_overlap")),
        "the target-only step does not split its batch",
        "drop it",
    ),
    Refusal(
        "--enable-pdmux",
        lambda a: bool(_get(a, "enable_pdmux")),
        "prefill and decode would run at once on the state of one step",
        "drop it",
    ),
    Refusal(
        "--enable-hisparse",
        lambda a: bool(_get(a, "enable_hisparse")),
        "its slot mapping is not updated by the target-only step",
        "drop it",
    ),
    Refusal(
        "a unified memory pool",
        lambda a: bool(_get(a, "enable_unified_memory")),
        "its slots are virtual, and the target-only step writes to physical ones",
        "drop --enable-unified-memory",
    ),
)


def check(arguments: Any, settings: Settings) -> None:
    """Refuse what is not built.

    Args:
        arguments: a view of the resolved server arguments.

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
    for refusal in REFUSALS:
        if refusal.applies(arguments):
            raise SettingsError(
                f"{flag} does not work with {refusal.what}: {refusal.why}. "
                f"Fix: {refusal.fix}, or drop {THRESHOLD_FLAG}."
            )
