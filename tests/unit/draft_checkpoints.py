"""Small checkpoints in the shapes that real drafters have, written without torch."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1, "F8_E4M3": 1}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
VOCAB, DRAFT_VOCAB = 300, 40
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@dataclass
class Spec:
    """A tensor to write; random bytes where ``data`` is None."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None

    def content(self, name: str) -> bytes:
        if self.data is not None:
            return self.data
        return random.Random(name).randbytes(math.prod(self.shape) * SIZES[self.dtype])


@dataclass
class Model:
    """A checkpoint before it is written. ``shards`` names the file of a tensor that is apart."""

    config: dict[str, Any]
    tensors: dict[str, Spec] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(self.config, indent=2))
        if self.tensors:
            write_safetensors(path / "model.safetensors", self.tensors)
        for name, text in self.files.items():
            (path / name).write_text(text)
        return path


def write_safetensors(
    file: Path, tensors: dict[str, Spec], metadata: dict[str, str] | None = None
) -> None:
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    data = b""
    for name, spec in tensors.items():
        content = spec.content(name)
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def longs(values: list[int], dtype: str = "I64") -> Spec:
    code = {"I64": "q", "I32": "i"}[dtype]
    return Spec(dtype, (len(values),), struct.pack(f"<{len(values)}{code}", *values))


def mask(ids: list[int], size: int = VOCAB) -> Spec:
    return Spec("BOOL", (size,), bytes(number in ids for number in range(size)))


# Target ids of the draft's vocabulary: dense at first, sparse later, as frequencies make them.
TARGET_IDS = [*range(20), *range(21, 300, 14)]
OFFSETS = [target - draft for draft, target in enumerate(TARGET_IDS)]
assert len(TARGET_IDS) == DRAFT_VOCAB


def llama_target() -> Model:
    """Llama-3.1-8B-Instruct, narrower."""
    return Model(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 128000,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "max_position_embeddings": 131072,
            "model_type": "llama",
            "num_attention_heads": HEADS,
            "num_hidden_layers": 32,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-05,
            "rope_scaling": dict(LLAMA3_ROPE),
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": VOCAB,
        }
    )


def kimi_target() -> Model:
    """Kimi-K2.5: multimodal, its language model one level down, multi-latent attention."""
    return Model(
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            "text_config": {
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "kimi_k2",
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "kv_lora_rank": 32,
                "q_lora_rank": 48,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
                "max_position_embeddings": 262144,
                "num_attention_heads": HEADS,
                "num_hidden_layers": 61,
                "num_key_value_heads": HEADS,
                "rope_theta": 50000.0,
                "vocab_size": VOCAB,
            },
            "vision_config": {"hidden_size": 32},
        }
    )


def _attention(prefix: str, width: int, dtype: str) -> dict[str, Spec]:
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.self_attn.q_proj.weight": Spec(dtype, (query, width)),
        f"{prefix}.self_attn.k_proj.weight": Spec(dtype, (key, width)),
        f"{prefix}.self_attn.v_proj.weight": Spec(dtype, (key, width)),
        f"{prefix}.self_attn.o_proj.weight": Spec(dtype, (HIDDEN, query)),
    }


def _mlp(prefix: str, dtype: str) -> dict[str, Spec]:
    return {
        f"{prefix}.mlp.gate_proj.weight": Spec(dtype, (INNER, HIDDEN)),
        f"{prefix}.mlp.up_proj.weight": Spec(dtype, (INNER, HIDDEN)),
        f"{prefix}.mlp.down_proj.weight": Spec(dtype, (HIDDEN, INNER)),
    }


def _norms(prefix: str, dtype: str, *names: str) -> dict[str, Spec]:
    return {f"{prefix}.{name}.weight": Spec(dtype, (HIDDEN,)) for name in names}


EAGLE3_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")


def eagle3(dtype: str = "BF16", *, layer: str = "midlayer") -> Model:
    """SpecForge's output for Llama-3.1-8B: SGLang's own layout, config derived from the target."""
    config = llama_target().config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
    }
    return Model(
        config,
        {
            "d2t": longs(OFFSETS),
            "t2d": mask(TARGET_IDS),
            "fc.weight": Spec(dtype, (HIDDEN, 3 * HIDDEN)),
            "lm_head.weight": Spec(dtype, (DRAFT_VOCAB, HIDDEN)),
            **_norms(layer, dtype, *EAGLE3_NORMS),
            **_mlp(layer, dtype),
            **_attention(layer, 2 * HIDDEN, dtype),
            "norm.weight": Spec(dtype, (HIDDEN,)),
        },
    )


def official_eagle3() -> Model:
    """The EAGLE authors' draft: float16, 2048 positions, RoPE unstated, the target's class."""
    model = eagle3("F16")
    for key in ("rope_scaling", "rope_theta", "head_dim", "attention_bias"):
        del model.config[key]
    model.config |= {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }
    return model


def speculators(*, norm_before_residual: bool | None = False) -> Model:
    """The nested format that speculators write for vLLM."""
    flat = eagle3(layer="layers.0")
    inner_keys = ("architectures", "draft_vocab_size", "torch_dtype", "tie_word_embeddings")
    inner = {k: v for k, v in flat.config.items() if k not in inner_keys}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFT_VOCAB,
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "architectures": ["LlamaForCausalLM"],
                "name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
            },
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "target_hidden_size": None,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": inner,
    }
    if norm_before_residual is not None:
        config["norm_before_residual"] = norm_before_residual
    return Model(config, flat.tensors)


def kimi_mha_draft() -> Model:
    """A multi-head draft for Kimi-K2.5, as kimi-k2.5-eagle3 has it."""
    model = eagle3()
    del model.config["rope_scaling"]
    model.config |= {"max_position_embeddings": 262144, "rope_theta": 50000.0}
    return model


def kimi_mla_draft() -> Model:
    """A draft with the target's multi-latent attention, stored as layers.0."""
    text = kimi_target().config["text_config"]
    config = text | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "draft_vocab_size": DRAFT_VOCAB,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    q_rank, kv_rank, nope, rope, value = 48, 32, 16, 8, 16
    attention = {
        "q_a_proj": (q_rank, 2 * HIDDEN),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (HEADS * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, 2 * HIDDEN),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (HEADS * (nope + value), kv_rank),
        "o_proj": (HIDDEN, HEADS * value),
    }
    return Model(
        config,
        {
            "d2t": longs(OFFSETS),
            "fc.weight": Spec("BF16", (HIDDEN, 3 * HIDDEN)),
            "lm_head.weight": Spec("BF16", (DRAFT_VOCAB, HIDDEN)),
            **{
                f"layers.0.self_attn.{name}.weight": Spec("BF16", shape)
                for name, shape in attention.items()
            },
            **_norms("layers.0", "BF16", *EAGLE3_NORMS),
            **_mlp("layers.0", "BF16"),
            "norm.weight": Spec("BF16", (HIDDEN,)),
        },
    )


def eagle1() -> Model:
    """An EAGLE (1 or 2) head: fc over embedding and state, no norm before its attention."""
    config = llama_target().config | {
        "architectures": ["LlamaForCausalLMEagle"],
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
    }
    return Model(
        config,
        {
            "embed_tokens.weight": Spec("BF16", (VOCAB, HIDDEN)),
            "fc.weight": Spec("BF16", (HIDDEN, 2 * HIDDEN)),
            "fc.bias": Spec("BF16", (HIDDEN,)),
            **_attention("layers.0", HIDDEN, "BF16"),
            **_mlp("layers.0", "BF16"),
            **_norms("layers.0", "BF16", "post_attention_layernorm"),
        },
    )


def nextn() -> Model:
    """DeepSeek-V3 given as its own draft: SGLang drafts with layer 61."""
    config = kimi_target().config["text_config"] | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "torch_dtype": "bfloat16",
    }
    return Model(
        config,
        {
            "model.embed_tokens.weight": Spec("BF16", (VOCAB, HIDDEN)),
            "model.layers.60.input_layernorm.weight": Spec("BF16", (HIDDEN,)),
            "model.layers.61.eh_proj.weight": Spec("BF16", (HIDDEN, 2 * HIDDEN)),
            "model.layers.61.enorm.weight": Spec("BF16", (HIDDEN,)),
            "model.layers.61.hnorm.weight": Spec("BF16", (HIDDEN,)),
        },
    )
