"""Rules about tensors: which of them SGLang takes, and which weights it leaves random."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_spec_ext.ops.check_draft.edits import AddZeros, RenameTensors
from sglang_spec_ext.ops.check_draft.finding import FixBy, Severity
from sglang_spec_ext.ops.check_draft.loaders import MIDLAYER_RELEASES
from sglang_spec_ext.ops.check_draft.pair import Hit, Pair, RuleBook, listed, to_midlayer

RULES = RuleBook()

# Not part of the model: masks, caches, copies of the target's weights kept by a trainer.
_HARMLESS = re.compile(r"rotary_emb|inv_freq|verifier_|\.[kv]_scale$|position_ids")
_EAGLE31 = re.compile(r"(^|\.)(fc_norm|aux_norm_(low|mid|high)|input_norm)\.")
# Weights whose absence or size has a rule of its own.
_OWN_RULE = ("embed_tokens.weight", "lm_head.weight")


@RULES.rule("shard-missing", Severity.ERROR)
def shards(pair: Pair) -> Iterator[Hit]:
    if pair.draft.missing_files:
        yield Hit(
            f"the index names files that are not here ({listed(list(pair.draft.missing_files))}); "
            "up to 0.5.16 SGLang loads the rest and leaves their weights random, later it stops",
            "run the download again",
            FixBy.AUTHOR,
        )


@RULES.rule("tensor-misplaced", Severity.ERROR)
def misplaced(pair: Pair) -> Iterator[Hit]:
    if pair.draft.misplaced:
        yield Hit(
            "the index promises tensors that their files lack: "
            f"{listed(list(pair.draft.misplaced))}",
            "download index and files from the same revision",
            FixBy.AUTHOR,
        )


@RULES.rule("tensor-duplicated", Severity.WARNING)
def duplicated(pair: Pair) -> Iterator[Hit]:
    if pair.draft.duplicated:
        yield Hit(
            f"in more than one file: {listed(list(pair.draft.duplicated))}; SGLang keeps "
            "whichever it reads last",
            "remove the stale file",
            FixBy.AUTHOR,
        )


@RULES.rule("file-unlisted", Severity.WARNING)
def unlisted(pair: Pair) -> Iterator[Hit]:
    if pair.draft.unlisted_files:
        yield Hit(
            f"not in the index, so SGLang does not load {listed(list(pair.draft.unlisted_files))}",
            "remove the file, or put its tensors into the index",
            FixBy.AUTHOR,
        )


@RULES.rule("layout-layers0", Severity.ERROR)
def layers0(pair: Pair) -> Iterator[Hit]:
    """The layout of speculators and vLLM: the decoder layer would be skipped whole."""
    if pair.layers0_names and pair.layers_on_disk == 1:
        yield Hit(
            f"the decoder layer is stored as layers.0.* ({len(pair.layers0_names)} tensors, as "
            "speculators and vLLM write it); SGLang skips all of it without a word and drafts "
            "with random weights",
            "--convert renames it to midlayer.*",
            FixBy.CONVERT,
            MIDLAYER_RELEASES,
            (RenameTensors(to_midlayer, "layers.0.* to midlayer.*"),),
        )


@RULES.rule("tensors-random", Severity.ERROR)
def left_random(pair: Pair) -> Iterator[Hit]:
    for load in pair.loads:
        names = [name for name in load.random if not _has_own_rule(pair, name)]
        if names:
            yield Hit(
                f"SGLang finds nothing for {listed(names)} and leaves them random",
                "get a checkpoint that has them",
                FixBy.AUTHOR,
                load.releases,
            )


@RULES.rule("tensors-skipped", Severity.ERROR)
def skipped(pair: Pair) -> Iterator[Hit]:
    """A weight that was trained and is not used makes another function of the model."""
    for load in pair.loads:
        names = [name for name in load.skipped if not _may_be_skipped(pair, name)]
        if names:
            yield Hit(
                f"SGLang has no place for {listed(names)}, skips them without a word and "
                "computes without them",
                "get a draft without them, or one that SGLang has a class for",
                FixBy.AUTHOR,
                load.releases,
            )


@RULES.rule("tensors-unused", Severity.NOTE)
def unused(pair: Pair) -> Iterator[Hit]:
    names = sorted({n for load in pair.loads for n in load.skipped if _HARMLESS.search(n)})
    if names:
        yield Hit(f"not part of the draft and not loaded: {listed(names)}")


@RULES.rule("tensor-shape", Severity.ERROR)
def shapes(pair: Pair) -> Iterator[Hit]:
    for load in pair.loads:
        wrong = [
            (tensor, wanted)
            for tensor, wanted in load.wrong_shape
            if tensor.name.removeprefix("model.") not in ("fc.weight", "lm_head.weight")
            and not _is_narrow_qkv(pair, tensor.name, tensor.shape)
        ]
        if wrong:
            tensor, wanted = wrong[0]
            others = f" (so with {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            yield Hit(
                f"{tensor.name} is {list(tensor.shape or ())}, config.json makes SGLang build it "
                f"as {list(wanted)}{others}",
                "correct the sizes in config.json, or get the checkpoint that belongs to it",
                FixBy.AUTHOR,
                load.releases,
            )


@RULES.rule("qkv-input-width", Severity.ERROR)
def qkv_width(pair: Pair) -> Iterator[Hit]:
    """EAGLE-3's first attention takes the embedding and the fused state side by side."""
    for load in pair.loads if pair.is_eagle3 else []:
        names = [
            tensor.name
            for tensor, _ in load.wrong_shape
            if _is_narrow_qkv(pair, tensor.name, tensor.shape)
        ]
        if names:
            hidden = pair.config.hidden_size
            yield Hit(
                f"{listed(names)} take {hidden} inputs; EAGLE-3 feeds twice the hidden size, "
                f"{2 * hidden}",
                "this is the layer of a plain model or of EAGLE 1; get an EAGLE-3 draft",
                FixBy.AUTHOR,
                load.releases,
            )


@RULES.rule("fc-bias-random", Severity.WARNING)
def fc_bias(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle and any("fc.bias" in load.random for load in pair.loads):
        fc = pair.draft.tensors.get("fc.weight")
        can = fc is not None and fc.shape is not None
        yield Hit(
            "fc has no bias here, SGLang's EAGLE class always has one and leaves it random",
            "--convert adds a bias of zeros" if can else "add an fc.bias of zeros",
            FixBy.CONVERT if can else FixBy.AUTHOR,
            edits=(AddZeros("fc.bias", "fc.weight", (pair.config.hidden_size,)),) if can else (),
        )


@RULES.rule("embed-missing", Severity.ERROR)
def embedding(pair: Pair) -> Iterator[Hit]:
    """The target's embedding is shared only where the widths agree."""
    lacking = pair.is_eagle3 and pair.tensor("embed_tokens.weight") is None
    if pair.loads and lacking and not pair.config.borrows_embedding:
        yield Hit(
            f"the draft is {pair.config.hidden_size} wide and its target "
            f"{pair.config.target_hidden_size}, so SGLang cannot share the target's "
            "embedding, and the file has no embed_tokens",
            "get a checkpoint with its embedding",
            FixBy.AUTHOR,
        )


@RULES.rule("embed-replaced", Severity.NOTE)
def embedding_replaced(pair: Pair) -> Iterator[Hit]:
    own = pair.tensor("embed_tokens.weight") is not None
    if pair.loads and own and pair.config.borrows_embedding:
        yield Hit("the draft's own embed_tokens gives way to the target's embedding")


def _has_own_rule(pair: Pair, name: str) -> bool:
    return name in _OWN_RULE or (name == "fc.bias" and pair.is_eagle)


def _may_be_skipped(pair: Pair, name: str) -> bool:
    if name == "lm_head.weight" and pair.config.tied:
        return True
    return bool(_HARMLESS.search(name)) or (pair.is_eagle3 and bool(_EAGLE31.search(name)))


def _is_narrow_qkv(pair: Pair, name: str, shape: tuple[int, ...] | None) -> bool:
    projections = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
    return (
        pair.is_eagle3
        and name.removesuffix(".weight").endswith(projections)
        and shape is not None
        and shape[1:] == (pair.config.hidden_size,)
    )
