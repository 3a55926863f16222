"""What SGLang's draft classes build and which tensors of a checkpoint they take, per release.

Read from ``models/llama_eagle3.py``, ``kimi_k25_eagle3.py``, ``llama_eagle.py`` and
``qwen2_eagle.py`` of every release in ``releases.RELEASES``. None of these loaders complains: a
name they do not know is skipped, a weight that no tensor fills keeps its random values.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sglang_spec_ext.compat.releases import RELEASES, before, span
from sglang_spec_ext.ops.check_draft.config import DraftConfig
from sglang_spec_ext.ops.check_draft.tensors import Tensor

Shape = tuple[int, ...]

LLAMA_EAGLE3 = "LlamaForCausalLMEagle3"
MLA_EAGLE3 = "Eagle3DeepseekV2ForCausalLM"
LLAMA_EAGLE = "LlamaForCausalLMEagle"
QWEN2_EAGLE = "Qwen2ForCausalLMEagle"

# Until here the one decoder layer is `midlayer`, `fc` takes three states, and there are no
# EAGLE-3.1 norms. From here on it is `layers.0`, and `midlayer` is translated.
GENERALISED = "0.5.12.post1"
MIDLAYER_RELEASES = before(GENERALISED)
MLA_FC_NORM = "0.5.13.post1"
NORM_BEFORE_FC = "0.5.17"


class Family(enum.Enum):
    """How a draft speculates; the value is the --speculative-algorithm that runs it."""

    EAGLE3 = "EAGLE3"
    EAGLE = "EAGLE"
    NEXTN = "NEXTN"  # a target's own MTP layers
    BLOCK = "DFLASH"  # block drafters: DFLASH, DSPARK
    FULL = "STANDALONE"  # a whole small model


@dataclass(frozen=True)
class DraftClass:
    """One of SGLang's draft classes. Without ``build``, its layout is not checked here."""

    name: str
    family: Family
    since: str = RELEASES[0]
    build: Callable[[DraftConfig, str], dict[str, Shape]] | None = None
    locate: Callable[[str, str], str | None] | None = None


@dataclass
class Load:
    """What becomes of a checkpoint in some releases, by the names that a checkpoint would use."""

    releases: tuple[str, ...]
    wanted: dict[str, Shape]
    random: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    wrong_shape: list[tuple[Tensor, Shape]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------
# EAGLE-3 with multi-head attention


def _llama_eagle3(config: DraftConfig, release: str) -> dict[str, Shape]:
    old = release in MIDLAYER_RELEASES
    hidden, states = config.hidden_size, 3 if old else config.num_aux_states
    fc_input = config.target_hidden_size * states
    wanted: dict[str, Shape] = {"fc.weight": (hidden, fc_input), "norm.weight": (hidden,)}
    if config.get("bias"):
        wanted["fc.bias"] = (hidden,)
    for layer in range(1 if old else config.num_layers):
        prefix = "midlayer" if old else f"layers.{layer}"
        wanted |= _attention(config, prefix, hidden * 2 if layer == 0 else hidden)
        if config.attention_bias:  # q, k and v never have one
            wanted[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        wanted |= _mlp(config, prefix)
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            wanted[f"{prefix}.{norm}.weight"] = (hidden,)
    if not old and config.has_fc_norm:
        wanted |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(states)}
    if release in span(NORM_BEFORE_FC) and config.has_input_norm:
        wanted["input_norm.weight"] = (fc_input,)
    return wanted | _embedding_and_head(config)


def _locate_llama_eagle3(name: str, release: str) -> str | None:
    if release not in MIDLAYER_RELEASES:
        name = name.replace("midlayer", "layers.0")
        for place, legacy in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
            name = name.replace(legacy, f"fc_norm.{place}")
    if "d2t" in name or "t2d" in name:
        return None
    return name if name.startswith("model.lm_head.") else name.removeprefix("model.")


# ---------------------------------------------------------------------------------------------
# EAGLE-3 with multi-latent attention (Kimi-K2.x)


def _mla_eagle3(config: DraftConfig, release: str) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.num_heads
    q_rank, kv_rank = config.integer("q_lora_rank"), config.integer("kv_lora_rank")
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    value = config.integer("v_head_dim")
    states = len(config.aux_layer_ids or config.foreign_aux_layer_ids or ()) or 3
    wanted: dict[str, Shape] = {
        "fc.weight": (hidden, config.target_hidden_size * states),
        "norm.weight": (hidden,),
        "layers.0.self_attn.q_a_proj.weight": (q_rank, 2 * hidden),
        "layers.0.self_attn.q_a_layernorm.weight": (q_rank,),
        "layers.0.self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        "layers.0.self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, 2 * hidden),
        "layers.0.self_attn.kv_a_layernorm.weight": (kv_rank,),
        "layers.0.self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * value),
    }
    wanted |= _mlp(config, "layers.0")
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        wanted[f"layers.0.{norm}.weight"] = (hidden,)
    if config.get("bias"):
        wanted["fc.bias"] = (hidden,)
    if release in span(MLA_FC_NORM) and config.has_fc_norm:
        wanted |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(states)}
    return wanted | _embedding_and_head(config)


def _locate_mla_eagle3(name: str, release: str) -> str | None:
    if re.search(r"(^|\.)(d2t|t2d)$", name):
        return None
    return re.sub(r"^midlayer\.", "layers.0.", name)


# ---------------------------------------------------------------------------------------------
# EAGLE and EAGLE-2


def _llama_eagle(config: DraftConfig, release: str) -> dict[str, Shape]:
    return _eagle(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)


def _qwen2_eagle(config: DraftConfig, release: str) -> dict[str, Shape]:
    return _eagle(config, qkv_bias=True, o_bias=False)


def _eagle(config: DraftConfig, *, qkv_bias: bool, o_bias: bool) -> dict[str, Shape]:
    hidden = config.hidden_size
    wanted: dict[str, Shape] = {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        "embed_tokens.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}"
        wanted |= _attention(config, prefix, hidden)
        if qkv_bias:
            for part in ("q", "k", "v"):
                rows = wanted[f"{prefix}.self_attn.{part}_proj.weight"][0]
                wanted[f"{prefix}.self_attn.{part}_proj.bias"] = (rows,)
        if o_bias:
            wanted[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        wanted |= _mlp(config, prefix)
        if layer:
            wanted[f"{prefix}.input_layernorm.weight"] = (hidden,)
        wanted[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return wanted  # embedding and lm_head are always the target's


def _locate_eagle(name: str, release: str) -> str | None:
    # The loader puts `model.` before every name, so one that has it already is lost.
    return None if "lm_head" in name else name


# ---------------------------------------------------------------------------------------------


def _attention(config: DraftConfig, prefix: str, width: int) -> dict[str, Shape]:
    query = config.num_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": (query, width),
        f"{prefix}.self_attn.k_proj.weight": (key, width),
        f"{prefix}.self_attn.v_proj.weight": (key, width),
        f"{prefix}.self_attn.o_proj.weight": (config.hidden_size, query),
    }


def _mlp(config: DraftConfig, prefix: str) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }


def _embedding_and_head(config: DraftConfig) -> dict[str, Shape]:
    wanted: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    if not config.tied:
        rows = config.draft_vocab_size or config.vocab_size
        wanted["lm_head.weight"] = (rows, config.hidden_size)
    return wanted


def _named(family: Family, *names: str) -> dict[str, DraftClass]:
    return {name: DraftClass(name, family) for name in names}


DRAFT_CLASSES: dict[str, DraftClass] = {
    LLAMA_EAGLE3: DraftClass(
        LLAMA_EAGLE3, Family.EAGLE3, build=_llama_eagle3, locate=_locate_llama_eagle3
    ),
    MLA_EAGLE3: DraftClass(
        MLA_EAGLE3, Family.EAGLE3, GENERALISED, build=_mla_eagle3, locate=_locate_mla_eagle3
    ),
    LLAMA_EAGLE: DraftClass(LLAMA_EAGLE, Family.EAGLE, build=_llama_eagle, locate=_locate_eagle),
    QWEN2_EAGLE: DraftClass(QWEN2_EAGLE, Family.EAGLE, build=_qwen2_eagle, locate=_locate_eagle),
    "MistralForCausalLMEagle": DraftClass("MistralForCausalLMEagle", Family.EAGLE, "0.5.11"),
    **_named(Family.EAGLE, "MistralLarge3ForCausalLMEagle"),
}

_NEXTN = re.compile(r"(NextN|MTP|AssistantForCausalLM)$")
_BLOCK = re.compile(r"(DFlash|DSpark|LiLiCorr|MuseGlimmerAssistant)")

# Full models that SGLang, given as a draft, turns into their own MTP layers.
BUNDLES_NEXTN = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV4ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Glm5NextForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
        "InklingForConditionalGeneration",
        "GigaChat35ForCausalLM",
        "BailingMoeV2ForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen4ExpForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "InternS2PreviewForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "HYV3ForCausalLM",
        "HYV4ForCausalLM",
    }
)


def draft_class(name: str) -> DraftClass | None:
    """The draft class that ``architectures`` names; None when SGLang has none of that name."""
    if name in DRAFT_CLASSES:
        return DRAFT_CLASSES[name]
    if _BLOCK.search(name):
        return DraftClass(name, Family.BLOCK)
    if _NEXTN.search(name) or name in BUNDLES_NEXTN:
        return DraftClass(name, Family.NEXTN)
    return None


def class_of_tensors(names: set[str], config: DraftConfig) -> DraftClass | None:
    """The draft class that a checkpoint's tensors were made for; None when that is not clear."""

    def has(part: str) -> bool:
        return any(part in name for name in names)

    if has("hidden_norm."):
        return DRAFT_CLASSES[MLA_EAGLE3 if has("kv_a_proj_with_mqa") else LLAMA_EAGLE3]
    if has("eh_proj") or has("mtp.") or has(".nextn") or has(".enorm."):
        return DraftClass("NEXTN", Family.NEXTN)
    if "fc.weight" in {name.removeprefix("model.") for name in names}:
        return DRAFT_CLASSES[QWEN2_EAGLE if config.model_type == "qwen2" else LLAMA_EAGLE]
    return None


# One tensor on disk that fills several of those in the lists above.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def simulate(
    draft: DraftClass,
    config: DraftConfig,
    tensors: dict[str, Tensor],
    names: dict[str, str],
    releases: Iterable[str],
) -> list[Load]:
    """What each of ``releases`` loads; those with the same outcome share a Load.

    ``names`` gives the name under which a tensor is to be offered to the loader of releases
    before 0.5.12.post1, so that a layout which only those miss can be judged apart.
    """
    assert draft.build is not None and draft.locate is not None
    loads: list[Load] = []
    for release in releases:
        load = Load((release,), draft.build(config, release))
        filled: set[str] = set()
        for name, tensor in tensors.items():
            offered = names.get(name, name) if release in MIDLAYER_RELEASES else name
            place = draft.locate(offered, release)
            if place is None:
                continue
            if not _fill(place, tensor, load, filled, quantised=config.quantization is not None):
                load.skipped.append(name)
        load.random = [name for name in load.wanted if name not in filled]
        same = next((other for other in loads if _outcome(other) == _outcome(load)), None)
        if same is None:
            loads.append(load)
        else:
            same.releases += load.releases
    return loads


def _fill(place: str, tensor: Tensor, load: Load, filled: set[str], *, quantised: bool) -> bool:
    """Put ``tensor`` where it belongs; False when nothing of the model has that name."""
    module, _, kind = place.rpartition(".")
    parts = [place]
    for fused, singles in _FUSED.items():
        if module.endswith(fused):
            parts = [f"{module.removesuffix(fused)}{single}.{kind}" for single in singles]
    if quantised and module.endswith("_proj"):
        # Packed weights, scales and zero points of some method: names and shapes are its own.
        stems = [part.rpartition(".")[0] for part in parts]
        mine = [want for want in load.wanted if want.rpartition(".")[0] in stems]
        filled.update(mine)
        return bool(mine)
    if not all(part in load.wanted for part in parts):
        return False
    filled.update(parts)
    shapes = [load.wanted[part] for part in parts]
    wanted = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if tensor.shape is not None and tensor.shape != wanted:
        load.wrong_shape.append((tensor, wanted))
    return True


def _outcome(load: Load) -> tuple[object, ...]:
    ours = [name.replace("midlayer.", "layers.0.") for name in load.random]
    return (ours, load.skipped, load.wrong_shape)
