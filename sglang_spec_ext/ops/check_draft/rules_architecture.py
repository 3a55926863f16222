"""Rules about what kind of draft this is and which arguments run it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_spec_ext.compat.releases import before
from sglang_spec_ext.ops.check_draft.config import NESTED, flatten
from sglang_spec_ext.ops.check_draft.edits import ReplaceConfig, SetConfig
from sglang_spec_ext.ops.check_draft.finding import FixBy, Severity
from sglang_spec_ext.ops.check_draft.loaders import (
    BUNDLES_NEXTN,
    LLAMA_EAGLE,
    LLAMA_EAGLE3,
    MIDLAYER_RELEASES,
    QWEN2_EAGLE,
    DraftClass,
    Family,
)
from sglang_spec_ext.ops.check_draft.pair import Hit, Pair, RuleBook

RULES = RuleBook()

_FULL_MODEL = re.compile(r"For(CausalLM|ConditionalGeneration)$")
_KINDS = {
    Family.EAGLE3: "an EAGLE-3 draft",
    Family.EAGLE: "an EAGLE (1 or 2) draft",
    Family.NEXTN: "a model's own MTP layers",
    Family.BLOCK: "a block draft",
    Family.FULL: "a full model",
}
_ALGORITHMS = {
    Family.EAGLE3: ("EAGLE3",),
    Family.EAGLE: ("EAGLE", "NEXTN"),
    Family.NEXTN: ("EAGLE", "NEXTN", "FROZEN_KV_MTP"),
    Family.FULL: ("STANDALONE",),
}


@RULES.rule("config-nested", Severity.ERROR)
def nested(pair: Pair) -> Iterator[Hit]:
    """speculators keep the draft's shape one level down, where SGLang does not look."""
    if not pair.config.nested:
        return
    kind = pair.config.raw.get("speculators_model_type")
    if kind != "eagle3":
        yield Hit(
            f"config.json is nested ({NESTED}) and of speculators type {kind!r}, "
            "which SGLang has no class for",
            "get the draft in SGLang's format",
            FixBy.AUTHOR,
        )
        return
    yield Hit(
        f"config.json is nested ({NESTED}, as speculators and vLLM have it); SGLang reads the "
        "top level only",
        "--convert flattens it",
        FixBy.CONVERT,
        edits=(ReplaceConfig(flatten(pair.config.raw), "flattened"),),
    )


@RULES.rule("arch-missing", Severity.ERROR)
def missing(pair: Pair) -> Iterator[Hit]:
    if not pair.config.architectures:
        yield _named_wrong(pair, "config.json names no architectures")


@RULES.rule("arch-target-class", Severity.ERROR)
def target_class(pair: Pair) -> Iterator[Hit]:
    """The config was copied from the target: SGLang would load the draft as a second target."""
    names = pair.config.architectures
    if not names or pair.fitting_class is None or not _is_full_model(pair, names[0]):
        return
    if pair.named_class is None or (pair.conflict and names[0] in BUNDLES_NEXTN):
        whose = "the target's class" if _is_targets(pair, names[0]) else "the class of a full model"
        kind = _KINDS[pair.fitting_class.family]
        yield _named_wrong(pair, f"config.json names {names[0]}, {whose}, but the keys are {kind}")


@RULES.rule("arch-unknown", Severity.ERROR)
def unknown(pair: Pair) -> Iterator[Hit]:
    names = pair.config.architectures
    if names and pair.named_class is None and not _is_full_model(pair, names[0]):
        yield _named_wrong(pair, f"SGLang has no class {names[0]}")


@RULES.rule("arch-keys", Severity.ERROR)
def keys(pair: Pair) -> Iterator[Hit]:
    """A draft class, but of another kind of draft."""
    names = pair.config.architectures
    if names and pair.conflict and names[0] not in BUNDLES_NEXTN:
        assert pair.fitting_class is not None
        kind = _KINDS[pair.fitting_class.family]
        if pair.fitting_class.family is Family.EAGLE3:
            kind += " for " + ("MHA" if pair.fitting_class.name == LLAMA_EAGLE3 else "MLA")
        yield _named_wrong(pair, f"config.json names {names[0]}, but the keys are {kind}")


@RULES.rule("arch-release", Severity.ERROR)
def release(pair: Pair) -> Iterator[Hit]:
    draft = pair.draft_class
    if draft is not None and before(draft.since):
        yield Hit(
            f"SGLang has {draft.name} only since {draft.since}",
            f"run SGLang {draft.since} or later",
            FixBy.SERVER,
            before(draft.since),
        )


@RULES.rule("not-a-draft", Severity.ERROR)
def not_a_draft(pair: Pair) -> Iterator[Hit]:
    """A full model drafts only under STANDALONE."""
    names = pair.config.architectures
    if pair.draft_class is None and names and _is_full_model(pair, names[0]):
        if (pair.server.algorithm or "").upper() == "STANDALONE":
            return
        yield Hit(
            f"{names[0]} with no draft's tensors is a full model, no EAGLE draft",
            "name the draft's directory, or run it with --speculative-algorithm STANDALONE",
            FixBy.SERVER,
        )


@RULES.rule("nextn-weights-missing", Severity.ERROR)
def nextn_weights(pair: Pair) -> Iterator[Hit]:
    """Quantised copies of MTP models often leave the MTP layers out."""
    named = pair.named_class
    if named is not None and named.family is Family.NEXTN and pair.fitting_class is None:
        words = ("mtp", "nextn", "eh_proj", "enorm", "assistant", "pre_projection")
        layer = f".layers.{pair.config.num_layers}."  # MTP layers are numbered after the last one
        if not any(
            layer in name or any(word in name.lower() for word in words)
            for name in pair.draft.tensors
        ):
            yield Hit(
                f"SGLang drafts with {named.name}'s own MTP layers, and this checkpoint has none",
                "get a copy of the model that keeps its MTP layers",
                FixBy.AUTHOR,
            )


@RULES.rule("class-not-checked", Severity.NOTE)
def not_checked(pair: Pair) -> Iterator[Hit]:
    draft = pair.draft_class
    if draft is not None and draft.build is None:
        yield Hit(f"the key layout of {draft.name} is not checked by this tool")


@RULES.rule("model-type-missing", Severity.ERROR)
def model_type(pair: Pair) -> Iterator[Hit]:
    if not pair.config.model_type:
        kind = {LLAMA_EAGLE3: "llama", LLAMA_EAGLE: "llama", QWEN2_EAGLE: "qwen2"}.get(
            pair.draft_class.name if pair.draft_class else ""
        )
        edits = (SetConfig({"model_type": kind}),) if kind else ()
        yield Hit(
            "config.json has no model_type, without which transformers cannot read it",
            f'--convert writes "model_type": "{kind}"' if kind else "add the model_type",
            FixBy.CONVERT if kind else FixBy.AUTHOR,
            edits=edits,
        )


@RULES.rule("hidden-act", Severity.ERROR)
def hidden_act(pair: Pair) -> Iterator[Hit]:
    act = pair.config.get("hidden_act", "silu")
    if pair.loads and act != "silu":
        yield Hit(
            f"hidden_act is {act!r}; SGLang's draft classes have silu only and refuse to start",
            "train the draft with silu, or correct config.json if it was",
            FixBy.AUTHOR,
        )


@RULES.rule("num-hidden-layers", Severity.ERROR)
def layers(pair: Pair) -> Iterator[Hit]:
    """Configs copied from the target say 32 or 40; SGLang then makes that many random layers."""
    if not pair.loads:
        return
    stated, there = pair.config.integer("num_hidden_layers", 1), pair.layers_on_disk
    if there and stated != there:
        yield Hit(
            f"config.json says {stated} layers, the file has {there}; SGLang leaves the others "
            "random, or refuses to start",
            f"--convert writes num_hidden_layers {there}",
            FixBy.CONVERT,
            edits=(SetConfig({"num_hidden_layers": there}),),
        )
    elif there > 1 and pair.is_llama_eagle3:
        yield Hit(
            f"an EAGLE-3 draft of {there} layers; these releases take one",
            "run SGLang 0.5.12.post1 or later",
            FixBy.SERVER,
            MIDLAYER_RELEASES,
        )


@RULES.rule("norm-before-residual", Severity.ERROR)
def norm_before_residual(pair: Pair) -> Iterator[Hit]:
    """No SGLang class can do it, so the draft computes something else than it was trained for."""
    if pair.is_eagle3 and pair.config.get("norm_before_residual"):
        stated = pair.config.raw.get("norm_before_residual") is not None
        why = "is true" if stated else "is absent from a nested config, which vLLM takes for true"
        yield Hit(
            f"norm_before_residual {why}; SGLang always takes the residual before the norm, and "
            "such a draft guesses badly there",
            'if it was trained without, write "norm_before_residual": false; else train one for '
            "SGLang, or serve it with vLLM",
            FixBy.AUTHOR,
        )


@RULES.rule("algorithm", Severity.ERROR)
def algorithm(pair: Pair) -> Iterator[Hit]:
    """The wrong one of EAGLE and EAGLE3 starts, and every guess is noise."""
    given = (pair.server.algorithm or "").upper()
    family = pair.draft_class.family if pair.draft_class else None
    if not given or family is None:
        return
    fits = _ALGORITHMS.get(family)
    wrong = given not in fits if fits else given in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
    if wrong:
        yield Hit(
            f"--speculative-algorithm {given} with {_KINDS[family]}",
            f"--speculative-algorithm {family.value}",
            FixBy.SERVER,
        )


def _is_full_model(pair: Pair, name: str) -> bool:
    if _is_targets(pair, name) or name in BUNDLES_NEXTN:
        return True
    return bool(_FULL_MODEL.search(name)) and "eagle" not in name.lower()


def _is_targets(pair: Pair, name: str) -> bool:
    return pair.known_target is not None and name in pair.known_target.architectures


def _named_wrong(pair: Pair, message: str) -> Hit:
    right: DraftClass | None = pair.fitting_class
    if right is None or right.build is None:
        return Hit(message, "name one of SGLang's draft classes in architectures", FixBy.AUTHOR)
    return Hit(
        message,
        f'--convert writes "architectures": ["{right.name}"]',
        FixBy.CONVERT,
        edits=(SetConfig({"architectures": [right.name]}),),
    )
