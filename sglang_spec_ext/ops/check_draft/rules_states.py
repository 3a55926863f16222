"""Rules about the target's hidden states: which are captured, and how the draft fuses them."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_spec_ext.compat.releases import before
from sglang_spec_ext.ops.check_draft.config import AUX_IDS, ModelConfig
from sglang_spec_ext.ops.check_draft.edits import SetConfig
from sglang_spec_ext.ops.check_draft.finding import FixBy, Severity
from sglang_spec_ext.ops.check_draft.loaders import (
    GENERALISED,
    MIDLAYER_RELEASES,
    MLA_FC_NORM,
    NORM_BEFORE_FC,
)
from sglang_spec_ext.ops.check_draft.pair import Hit, Pair, RuleBook, listed

RULES = RuleBook()


@RULES.rule("fc-width", Severity.ERROR)
def fc_width(pair: Pair) -> Iterator[Hit]:
    for load in pair.loads:
        for tensor, wanted in load.wrong_shape:
            if tensor.name.removeprefix("model.") != "fc.weight" or _fits_target(pair) is not None:
                continue
            if _only_count_differs(pair, tensor.shape, load.releases):
                continue
            what = f"fc.weight is {list(tensor.shape or ())}, SGLang builds {list(wanted)}"
            if pair.is_eagle3:
                width = pair.config.target_hidden_size
                what += f": {wanted[1] // width} captured states of width {width}"
                if tensor.shape and len(tensor.shape) == 2 and tensor.shape[1] % width == 0:
                    what += f", the file has {tensor.shape[1] // width}"
            yield Hit(
                what,
                f"state how many layers the draft was trained on (eagle_config.{AUX_IDS}) and "
                "target_hidden_size",
                FixBy.AUTHOR,
                load.releases,
            )


@RULES.rule("fc-states-release", Severity.ERROR)
def fc_states_release(pair: Pair) -> Iterator[Hit]:
    for load in pair.loads:
        for tensor, _ in load.wrong_shape:
            if tensor.name.removeprefix("model.") == "fc.weight" and _only_count_differs(
                pair, tensor.shape, load.releases
            ):
                yield Hit(
                    f"fc takes {pair.config.num_aux_states} captured states; these releases "
                    "always build it for three",
                    f"run SGLang {GENERALISED} or later",
                    FixBy.SERVER,
                    MIDLAYER_RELEASES,
                )


@RULES.rule("fc-states", Severity.ERROR)
def fc_states(pair: Pair) -> Iterator[Hit]:
    ids = pair.config.aux_layer_ids
    if pair.is_eagle3 and ids and pair.config.num_aux_states != len(ids):
        yield Hit(
            f"num_aux_hidden_states is {pair.config.num_aux_states}, but {len(ids)} layers are "
            f"to be captured: {list(ids)}",
            "make the two agree",
            FixBy.AUTHOR,
        )


@RULES.rule("fc-unused", Severity.WARNING)
def fc_unused(pair: Pair) -> Iterator[Hit]:
    """SGLang applies fc only when the state is not as wide as the draft already."""
    config = pair.config
    if not pair.is_eagle3 or pair.tensor("fc.weight") is None or not config.borrows_embedding:
        return
    if not config.uses_aux_states or config.num_aux_states == 1:
        why = "use_aux_hidden_state is false" if not config.uses_aux_states else "one state only"
        yield Hit(
            f"{why}: the state has the draft's width, and SGLang then never applies fc",
            "correct eagle_config if the draft was trained with fc",
            FixBy.AUTHOR,
        )


@RULES.rule("target-hidden-size-null", Severity.ERROR)
def target_hidden_null(pair: Pair) -> Iterator[Hit]:
    values = pair.config.values
    if pair.is_llama_eagle3 and values.get("target_hidden_size", ...) is None:
        yield Hit(
            "target_hidden_size is null; SGLang multiplies by it and stops",
            "--convert removes the key",
            FixBy.CONVERT,
            edits=(SetConfig(remove=("target_hidden_size",)),),
        )


@RULES.rule("target-hidden", Severity.ERROR, needs_target=True)
def target_hidden(pair: Pair) -> Iterator[Hit]:
    if not (pair.is_eagle3 or pair.is_eagle):
        return
    stated, real = pair.config.target_hidden_size, pair.target.hidden_size
    if stated == real:
        return
    fitting = _fits_target(pair)
    if fitting is not None:
        yield Hit(
            f"fc fits {fitting} states of this target's width {real}, but config.json makes "
            f"SGLang build it for {stated}",
            f'--convert writes "target_hidden_size": {real}',
            FixBy.CONVERT,
            edits=(SetConfig({"target_hidden_size": real}),),
        )
    else:
        yield Hit(
            f"the draft takes states of width {stated}, this target's are {real} wide",
            "this draft belongs to another target",
            FixBy.AUTHOR,
        )


@RULES.rule("aux-layer-ids-place", Severity.ERROR)
def aux_place(pair: Pair) -> Iterator[Hit]:
    """vLLM reads the captured layers at the top level, and counts inputs where SGLang counts
    outputs: its layer k is SGLang's k - 1."""
    ids = _misplaced_ids(pair)
    if not ids:
        return
    known = pair.known_target
    if len(ids) == 3 and (known is None or ids == _default_ids(known)):
        return
    ours = [number - 1 for number in ids]
    default = list(_default_ids(known)) if known else "its default ones"
    message = (
        f"{AUX_IDS} {list(ids)} stands where only vLLM reads it; SGLang captures before layers "
        f"{default} instead"
    )
    if min(ours) < 0:
        yield Hit(message, "SGLang cannot capture the embedding; train another", FixBy.AUTHOR)
    elif ours[0] != 1 and (known is None or _reads_ids_verbatim(known)):
        yield Hit(
            message,
            "write them into eagle_config by hand: for DeepSeek and Kimi targets SGLang's releases "
            "count such numbers differently",
            FixBy.AUTHOR,
        )
    else:
        eagle = {**pair.config.eagle_config, "use_aux_hidden_state": True, AUX_IDS: ours}
        yield Hit(
            message,
            f"--convert writes eagle_config with {ours}, the same layers as SGLang counts them",
            FixBy.CONVERT,
            edits=(SetConfig({"eagle_config": eagle}),),
        )


@RULES.rule("aux-layer-ids-unchecked", Severity.WARNING)
def aux_unchecked(pair: Pair) -> Iterator[Hit]:
    ids = _misplaced_ids(pair)
    if ids and len(ids) == 3 and pair.known_target is None:
        yield Hit(
            f"{AUX_IDS} {list(ids)} stands where only vLLM reads it; SGLang captures its default "
            "layers, which may or may not be these",
            "give --target to find out",
            FixBy.SERVER,
        )


@RULES.rule("aux-layer-ids-range", Severity.ERROR, needs_target=True)
def aux_range(pair: Pair) -> Iterator[Hit]:
    ids = pair.config.aux_layer_ids if pair.is_eagle3 else None
    if not ids:
        return
    last = pair.target.num_layers - 2
    if _reads_ids_verbatim(pair.target) and ids[0] != 1:
        last += 1
    wrong = [number for number in ids if not 0 <= number <= last]
    if wrong:
        yield Hit(
            f"layers {wrong} are to be captured, this target can give 0 to {last}; SGLang "
            "captures fewer states than fc expects",
            "this draft belongs to another target",
            FixBy.AUTHOR,
        )


@RULES.rule("aux-layer-ids-shift", Severity.WARNING, needs_target=True)
def aux_shift(pair: Pair) -> Iterator[Hit]:
    ids = pair.config.aux_layer_ids if pair.is_eagle3 else None
    if ids and ids[0] != 1 and _reads_ids_verbatim(pair.target):
        yield Hit(
            f"for this target SGLang captures after layers {list(ids)} up to 0.5.12.post1 and "
            "before them from 0.5.13.post1 on, because the first is not 1",
            "use the release that the draft was trained with, and watch the accept length",
            FixBy.SERVER,
        )


@RULES.rule("aux-layer-ids-graph", Severity.WARNING, needs_target=True)
def aux_graph(pair: Pair) -> Iterator[Hit]:
    ids = pair.config.aux_layer_ids if pair.is_eagle3 else None
    if pair.server.disable_cuda_graph or pair.server.plugin:
        return
    if ids and tuple(number + 1 for number in ids) != _default_ids(pair.target):
        yield Hit(
            f"layers {list(ids)} are to be captured, but these releases record their CUDA graphs "
            "with the default layers, so that decoding feeds the draft other states than prefill",
            "load the sglang_spec_ext plugin, run SGLang 0.5.11 or later, or --disable-cuda-graph",
            FixBy.SERVER,
            before("0.5.11"),
        )


# --- EAGLE-3.1 --------------------------------------------------------------------------------


@RULES.rule("fc-norm-release", Severity.ERROR)
def fc_norm_release(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle3 and (pair.config.has_fc_norm or _has(pair, "fc_norm.", "aux_norm_")):
        since = GENERALISED if pair.is_llama_eagle3 else MLA_FC_NORM
        yield _too_old("fc_norm, a norm for each captured state", since)


@RULES.rule("norm-output-release", Severity.ERROR)
def norm_output_release(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle3 and pair.config.get("norm_output"):
        since = GENERALISED if pair.is_llama_eagle3 else MLA_FC_NORM
        yield _too_old("norm_output, the normed state as the next step's input", since)


@RULES.rule("norm-before-fc-release", Severity.ERROR)
def norm_before_fc_release(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle3 and (pair.config.has_input_norm or _has(pair, "input_norm.")):
        if pair.is_llama_eagle3:
            yield _too_old("norm_before_fc, one norm over all captured states", NORM_BEFORE_FC)
        else:
            yield Hit(
                "norm_before_fc, which SGLang's MLA draft class does not have",
                "get a draft without it",
                FixBy.AUTHOR,
            )


@RULES.rule("eagle31-flag", Severity.ERROR)
def eagle31_flag(pair: Pair) -> Iterator[Hit]:
    """The norms are in the file, but nothing in config.json makes SGLang build them."""
    if not pair.is_eagle3:
        return
    flags = {}
    if _has(pair, "fc_norm.", "aux_norm_") and not pair.config.has_fc_norm:
        flags["fc_norm"] = True
    if _has(pair, "input_norm.") and not pair.config.has_input_norm and pair.is_llama_eagle3:
        flags["norm_before_fc"] = True
    if flags:
        yield Hit(
            f"the file has the norms, config.json lacks {listed(list(flags))}: SGLang skips them",
            "--convert sets the flag",
            FixBy.CONVERT,
            edits=(SetConfig(flags),),
        )


def _fits_target(pair: Pair) -> int | None:
    """How many of the target's states fc takes, if config.json merely fails to say how wide."""
    fc, known = pair.tensor("fc.weight"), pair.known_target
    if not pair.is_eagle3 or fc is None or fc.shape is None or known is None:
        return None
    states = pair.config.num_aux_states
    if pair.config.states_target_hidden_size or pair.config.hidden_size == known.hidden_size:
        return None
    return states if fc.shape[1:] == (states * known.hidden_size,) else None


def _only_count_differs(
    pair: Pair, shape: tuple[int, ...] | None, releases: tuple[str, ...]
) -> bool:
    config = pair.config
    newer = (config.hidden_size, config.target_hidden_size * config.num_aux_states)
    return pair.is_llama_eagle3 and shape == newer and set(releases) <= set(MIDLAYER_RELEASES)


def _misplaced_ids(pair: Pair) -> tuple[int, ...] | None:
    if not pair.is_eagle3 or pair.config.aux_layer_ids:
        return None
    return pair.config.foreign_aux_layer_ids


def _default_ids(target: ModelConfig) -> tuple[int, ...]:
    layers = target.num_layers
    return (2, layers // 2, layers - 3)


def _reads_ids_verbatim(target: ModelConfig) -> bool:
    """DeepSeek's setter and those who inherit it count from where the first number is not 1."""
    names = target.architectures
    if any(name.startswith("Longcat") for name in names):
        return False
    return target.is_mla or "Glm4MoeLiteForCausalLM" in names


def _too_old(what: str, since: str) -> Hit:
    return Hit(
        f"the draft has {what}; these releases ignore it",
        f"run SGLang {since} or later",
        FixBy.SERVER,
        before(since),
    )


def _has(pair: Pair, *parts: str) -> bool:
    return any(part in name for name in pair.draft.tensors for part in parts)
