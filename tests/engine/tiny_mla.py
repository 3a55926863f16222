"""A random DeepSeek-V2, whose attention is latent (MLA), and a random EAGLE-3 draft for it.

In float32 its greedy text has no near ties, so whatever changes a token is an error and no
rounding. The draft is an ordinary one of one layer; nothing that it proposes is accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import eagle3_families as families
import torch
from safetensors.torch import save_file

VOCABULARY, HIDDEN, LAYERS, HEADS, INTERMEDIATE = 512, 256, 4, 16, 512
LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
DRAFT_HEADS, DRAFT_HEAD = 2, 128

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
}
TARGET = {
    **families.DEEPSEEK,
    **SIZES,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}
DRAFT = {
    **families.DRAFT,
    **SIZES,
    "num_attention_heads": DRAFT_HEADS,
    "num_key_value_heads": DRAFT_HEADS,
    "head_dim": DRAFT_HEAD,
    "draft_vocab_size": VOCABULARY,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
_MLP = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE)}  # fmt: skip


def write(folder: Path) -> None:
    """``folder/target`` and ``folder/draft``, the same at every call."""
    torch.manual_seed(0)
    target = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    norms = {"model.norm": HIDDEN}
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        target |= {
            f"{layer}.self_attn.q_proj": (HEADS * (NOPE + ROPE), HIDDEN),
            f"{layer}.self_attn.kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
            f"{layer}.self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
            f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * VALUE),
            **{f"{layer}.mlp.{name}": shape for name, shape in _MLP.items()},
        }
        norms |= {
            f"{layer}.input_layernorm": HIDDEN,
            f"{layer}.post_attention_layernorm": HIDDEN,
            f"{layer}.self_attn.kv_a_layernorm": LATENT,
        }
    _save(folder / "target", TARGET, target, norms)
    width = DRAFT_HEADS * DRAFT_HEAD
    draft = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
        **{f"midlayer.self_attn.{name}_proj": (width, 2 * HIDDEN) for name in "qkv"},
        "midlayer.self_attn.o_proj": (HIDDEN, width),
        **{f"midlayer.mlp.{name}": shape for name, shape in _MLP.items()},
    }
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    norms = {"norm": HIDDEN, **{f"midlayer.{name}": HIDDEN for name in names}}
    _save(folder / "draft", DRAFT, draft, norms)


def _save(
    folder: Path,
    config: dict[str, Any],
    matrices: dict[str, tuple[int, int]],
    norms: dict[str, int],
) -> None:
    folder.mkdir(parents=True)
    weights = {f"{name}.weight": torch.ones(width) for name, width in norms.items()}
    for name, shape in matrices.items():
        weights[f"{name}.weight"] = torch.randn(shape) * shape[-1] ** -0.5
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
