"""Rules about what target, draft and server must have in common to run together."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_spec_ext.compat.releases import before
from sglang_spec_ext.ops.check_draft.config import ModelConfig
from sglang_spec_ext.ops.check_draft.edits import SetConfig
from sglang_spec_ext.ops.check_draft.finding import FixBy, Severity
from sglang_spec_ext.ops.check_draft.loaders import MLA_EAGLE3
from sglang_spec_ext.ops.check_draft.pair import Hit, Pair, RuleBook, listed
from sglang_spec_ext.ops.check_draft.server import ALLOW_LONGER_CONTEXT
from sglang_spec_ext.ops.check_draft.tensors import BITS, PLAIN_FLOATS

RULES = RuleBook()

DEFAULT_CONTEXT = 2048  # of transformers' configs and of SGLang, where nothing is stated

# Attention backends that only run multi-latent attention.
MLA_BACKENDS = frozenset(
    {"trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "cutlass_mla", "flashmla", "nsa", "dsa"}
)
# --quantization methods that take a plain checkpoint and quantise it while loading.
ONLINE_QUANTIZATION = frozenset({"fp8", "mxfp8", "bitsandbytes", "quark_mxfp4", "mlx_q4", "mlx_q8"})

_STORED_AS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}


# --- positions --------------------------------------------------------------------------------


@RULES.rule("context-length", Severity.ERROR, needs_target=True)
def context_length(pair: Pair) -> Iterator[Hit]:
    ours, needed = _contexts(pair)
    if ours < needed and not pair.server.allow_longer_context:
        yield Hit(
            f"the draft allows {ours} tokens, the server asks for {needed}; SGLang refuses to "
            "start",
            f"start it with {ALLOW_LONGER_CONTEXT}=1, or with --context-length {ours}",
            FixBy.SERVER,
        )


@RULES.rule("context-length-stretched", Severity.WARNING, needs_target=True)
def context_stretched(pair: Pair) -> Iterator[Hit]:
    ours, needed = _contexts(pair)
    if ours < needed and pair.server.allow_longer_context:
        yield Hit(
            f"the draft was made for {ours} tokens and will be run up to {needed}; expect a lower "
            "accept length for longer requests",
            "such requests are candidates for speculation off; watch the accept length",
            FixBy.AUTHOR,
        )


@RULES.rule("rope-differs", Severity.WARNING, needs_target=True)
def rope(pair: Pair) -> Iterator[Hit]:
    """A draft may have a RoPE of its own; one that is nearly the target's is a slip."""
    if not (pair.is_eagle3 or pair.is_eagle):
        return
    ours, theirs = pair.config, pair.target
    parts = []
    if ours.rope_theta and theirs.rope_theta and ours.rope_theta != theirs.rope_theta:
        parts.append(f"rope_theta {ours.rope_theta:g}, the target's {theirs.rope_theta:g}")
    if ours.rope_scaling and theirs.rope_scaling and ours.rope_scaling != theirs.rope_scaling:
        keys = sorted(
            key
            for key in {*ours.rope_scaling, *theirs.rope_scaling}
            if ours.rope_scaling.get(key) != theirs.rope_scaling.get(key)
        )
        parts.append(f"rope scaling differs in {listed(keys)}")
    if parts:
        yield Hit(
            "; ".join(parts),
            "right only if the draft was trained so; ask its author",
            FixBy.AUTHOR,
        )


@RULES.rule("rope-unstated", Severity.NOTE, needs_target=True)
def rope_unstated(pair: Pair) -> Iterator[Hit]:
    if not (pair.is_eagle3 or pair.is_eagle):
        return
    ours, theirs = pair.config, pair.target
    parts = []
    if not ours.rope_theta and theirs.rope_theta not in (None, 10000.0):
        parts.append(f"with rope_theta 10000, the target's is {theirs.rope_theta:g}")
    if not ours.rope_scaling and theirs.rope_scaling:
        parts.append(f"without rope scaling, the target with {theirs.rope_scaling['rope_type']}")
    if parts:
        yield Hit(f"the draft runs {'; '.join(parts)}")


@RULES.rule("rope-parameters-release", Severity.ERROR)
def rope_parameters(pair: Pair) -> Iterator[Hit]:
    """transformers 5 writes rope_parameters, which these releases do not look at."""
    config = pair.config
    if not isinstance(config.get("rope_parameters"), dict) or not pair.loads:
        return
    values: dict[str, object] = {}
    if config.get("rope_theta") is None and config.rope_theta not in (None, 10000.0):
        values["rope_theta"] = config.rope_theta
    if config.get("rope_scaling") is None and config.rope_scaling:
        values["rope_scaling"] = config.rope_scaling
    if values:
        yield Hit(
            f"only rope_parameters states {listed(list(values))}; these releases do not read it "
            "and run the draft with another RoPE",
            "--convert states it in the old keys too",
            FixBy.CONVERT,
            before("0.5.10.post1"),
            (SetConfig(values),),
        )


# --- attention --------------------------------------------------------------------------------


@RULES.rule("mla-draft-backend", Severity.ERROR, needs_target=True)
def draft_backend(pair: Pair) -> Iterator[Hit]:
    wrong = sorted(_draft_backends(pair) & MLA_BACKENDS)
    if _is_mha_draft_of_mla(pair) and wrong:
        yield Hit(
            f"the draft would run on {listed(wrong)}, which takes MLA models only, and has "
            "multi-head attention",
            "--speculative-draft-attention-backend fa3 (Hopper) or trtllm_mha (Blackwell)",
            FixBy.SERVER,
        )


@RULES.rule("mla-draft-backend-unset", Severity.WARNING, needs_target=True)
def draft_backend_unset(pair: Pair) -> Iterator[Hit]:
    if _is_mha_draft_of_mla(pair) and not _draft_backends(pair):
        yield Hit(
            "an MLA target with a multi-head draft: on Blackwell SGLang gives both the MLA "
            "backend, which the draft cannot run on",
            "--speculative-draft-attention-backend trtllm_mha there (fa3 on Hopper)",
            FixBy.SERVER,
        )


# --- numbers ----------------------------------------------------------------------------------


@RULES.rule("dtype", Severity.ERROR, needs_target=True)
def dtype(pair: Pair) -> Iterator[Hit]:
    if not (pair.is_eagle3 or pair.is_eagle) or pair.server.dtype not in (None, "auto"):
        return
    ours, theirs = pair.config.dtype, pair.target.dtype
    if ours != theirs:
        yield Hit(
            f"config.json makes SGLang run the draft in {ours}, the target in {theirs}; the "
            "target's states and embedding do not fit the draft's weights",
            f"--dtype {theirs}",
            FixBy.SERVER,
        )


@RULES.rule("dtype-stored", Severity.NOTE)
def dtype_stored(pair: Pair) -> Iterator[Hit]:
    if not pair.loads:
        return
    given = pair.server.dtype
    run = given if given and given != "auto" else pair.config.dtype
    stored = {t.dtype for t in pair.draft.tensors.values() if t.dtype in PLAIN_FLOATS}
    if stored and stored != {_STORED_AS.get(run or "")}:
        names = listed(sorted(str(name) for name in stored))
        yield Hit(f"the weights are stored as {names} and run in {run}")


@RULES.rule("quantised-draft", Severity.NOTE)
def quantised(pair: Pair) -> Iterator[Hit]:
    if pair.loads and pair.config.quantization:
        yield Hit(
            f"the draft is quantised ({pair.config.quantization}); shapes of its packed weights "
            "are not checked"
        )


@RULES.rule("quantised-without-config", Severity.ERROR)
def quantised_without_config(pair: Pair) -> Iterator[Hit]:
    if not pair.loads or pair.config.quantization:
        return
    names = _packed(pair, ("_proj.weight", "fc.weight", "lm_head.weight"))
    if names:
        yield Hit(
            f"{listed(names)} hold quantised numbers, but config.json has no quantization_config; "
            "SGLang copies them as they are and skips their scales",
            "add the quantization_config, or get the unquantised draft",
            FixBy.AUTHOR,
        )


@RULES.rule("quantised-fc", Severity.ERROR)
def quantised_fc(pair: Pair) -> Iterator[Hit]:
    """Whatever the quantization_config says, these are plain layers in SGLang."""
    if not pair.loads or not pair.config.quantization:
        return
    assert pair.draft_class is not None
    mla = pair.draft_class.name == MLA_EAGLE3
    names = _packed(pair, ("norm.weight",) if mla else ("fc.weight", "norm.weight"))
    if names:
        yield Hit(
            f"{listed(names)} are quantised; SGLang has these as plain layers and skips their "
            "scales",
            "exclude them from the quantisation",
            FixBy.AUTHOR,
        )


@RULES.rule("quantisation-inherited", Severity.WARNING)
def inherited(pair: Pair) -> Iterator[Hit]:
    method = pair.server.quantization
    if not pair.loads or pair.config.quantization or pair.server.draft_quantization:
        return
    if method and method != "unquant" and method not in ONLINE_QUANTIZATION:
        yield Hit(
            f"--quantization {method} holds for the draft too, which is not quantised that way",
            "--speculative-draft-model-quantization unquant",
            FixBy.SERVER,
        )


def _contexts(pair: Pair) -> tuple[int, int]:
    ours = pair.config.context_length or DEFAULT_CONTEXT
    theirs = pair.target.context_length or DEFAULT_CONTEXT
    return ours, pair.server.context_length or theirs


def _is_mha_draft_of_mla(pair: Pair) -> bool:
    mha: ModelConfig = pair.config
    return (pair.is_eagle3 or pair.is_eagle) and pair.target.is_mla and not mha.is_mla


def _draft_backends(pair: Pair) -> set[str]:
    """The attention backends that the draft runs on; empty where SGLang chooses by GPU."""
    server = pair.server
    if server.draft_attention_backend:
        return {server.draft_attention_backend}
    base = server.attention_backend or ("dsa" if pair.target.is_sparse_mla else None)
    both = (
        server.decode_attention_backend or base,
        server.prefill_attention_backend or base,
    )
    return {backend for backend in both if backend}


def _packed(pair: Pair, endings: tuple[str, ...]) -> list[str]:
    return [
        name
        for name, tensor in pair.draft.tensors.items()
        if name.endswith(endings) and tensor.dtype in BITS and tensor.dtype not in PLAIN_FLOATS
    ]
