"""Keep the draft warm: write its K and V for one token per request, and run nothing else of it.

For a one-layer draft, K and V of a position depend on that position's input alone (the fused target
hidden state and the token's embedding), not on attention. So the draft's cache can be kept complete
without its attention, MLP or LM head. EAGLE-3: https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear

from sglang_spec_ext.compat import sglang_api

# Draft classes whose input path is the one written out in `DraftKVWriter.write`.
KNOWN_DRAFTS = ("LlamaForCausalLMEagle3",)


class DraftKVWriter:
    """Writes draft K/V for tokens that the target committed without speculation.

    Args:
        draft_runner: SGLang's ModelRunner of the draft; must pass `why_not`.
    """

    def __init__(self, draft_runner: Any) -> None:
        self._model = draft_runner.model.model
        (self._layer,) = _layers(self._model)
        self._attention = _with_fewest_query_heads(self._layer.self_attn)
        self._pool = draft_runner.token_to_kv_pool
        self.hidden_width: int = self._model.fc.in_features
        self.hidden_dtype: torch.dtype = self._model.fc.weight.dtype

    @staticmethod
    def why_not(draft_runner: Any) -> str | None:
        """Why this draft needs SGLang's own draft extend on every step; None if it does not."""
        name = type(draft_runner.model).__name__
        if name not in KNOWN_DRAFTS:
            return f"{name} is not one of {', '.join(KNOWN_DRAFTS)}"
        model = draft_runner.model.model
        layers = _layers(model)
        if len(layers) != 1:
            return f"{name} has {len(layers)} layers, and K/V of the later ones need attention"
        if getattr(model, "is_mrope_enabled", False):
            return f"{name} uses multimodal rotary positions"
        if not sglang_api.plain_mha_pool(draft_runner.token_to_kv_pool):
            return f"the draft's KV pool is a {type(draft_runner.token_to_kv_pool).__name__}"
        return None

    def write(
        self,
        token_ids: torch.Tensor,
        target_hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write one draft row per token: row p holds token p + 1 and the target's hidden at p.

        Args:
            token_ids: [tokens] int64, the token *after* each position.
            target_hidden: [tokens, hidden_width], the target's captured state at each position.
            positions: [tokens] int64.
            slots: [tokens] int64, KV slot of each position.
        """
        layer, attention = self._layer, self._layer.self_attn
        embeds = layer.input_layernorm(self._model.embed_tokens(token_ids))
        fused = layer.hidden_norm(self._fuse(target_hidden))
        prepare = type(attention).forward_prepare_native
        _, k, v = prepare(self._attention, positions, torch.cat([embeds, fused], dim=-1))
        shape = (-1, attention.num_kv_heads, attention.head_dim)
        sglang_api.write_kv(self._pool, attention.attn, slots, k.reshape(shape), v.reshape(shape))

    def _fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        # the optional norms are those of SGLang's LlamaModel.forward for EAGLE-3
        if getattr(self._model, "input_norm", None) is not None:
            hidden = self._model.input_norm(hidden)
        norms = getattr(self._model, "fc_norm", None)
        if norms is not None:
            chunks = hidden.chunk(len(norms), dim=-1)
            hidden = torch.cat([n(c) for n, c in zip(norms, chunks, strict=True)], dim=-1)
        fused: torch.Tensor = self._model.fc(hidden)
        return fused


def _with_fewest_query_heads(attention: Any) -> Any:
    """What ``forward_prepare_native`` reads of an attention layer, with as few query heads as RoPE
    kernels take: one for each KV head. The others are most of the projection, and nobody reads
    them. Quantized and packed weights are taken whole."""
    projection = attention.qkv_proj
    if not sglang_api.plain_weight(projection):
        return attention
    left_out = attention.q_size - attention.kv_size

    def project(inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return linear(inputs, projection.weight[left_out:]), None

    return SimpleNamespace(
        qkv_proj=project,
        q_size=attention.kv_size,
        kv_size=attention.kv_size,
        rotary_emb=attention.rotary_emb,
    )


def _layers(model: Any) -> list[Any]:
    # named `midlayer` before drafts could have more than one layer
    return [model.midlayer] if hasattr(model, "midlayer") else list(model.layers)
