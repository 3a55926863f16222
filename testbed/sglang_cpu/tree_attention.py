"""Attention with tree masks, for releases whose CPU backends cannot speculate.

It takes the place of SGLang's ``torch_native`` backend and runs the same stand-in kernels as the
test bed of newer releases. Page size 1 only.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from .kernels import attention


class TreeAttentionBackend(AttentionBackend):
    """Attention of one ModelRunner: prefill, decode, verify and draft extend."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._slot_table = runner.req_to_token_pool.req_to_token
        self._pool = runner.token_to_kv_pool
        self.branches: tuple[Tensor, Tensor] | None = None
        """Of a draft decode step: a slot table with one row per branch, and the rows' lengths."""
        self._extend: tuple[Tensor, Tensor, Tensor | None] | None = None
        """Lengths with and without what is cached, and the trees' masks."""

    def init_forward_metadata(self, batch: Any) -> None:
        if batch.forward_mode.is_target_verify():
            nodes = batch.spec_info.draft_token_num
            new = torch.full((batch.batch_size,), nodes)
            self._extend = batch.seq_lens + nodes, new, _among_new(batch, nodes)
        elif not batch.forward_mode.is_decode_or_idle():
            self._extend = batch.seq_lens, batch.extend_seq_lens, None

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        assert self._extend is not None
        q, o = self._store(q, k, v, layer, batch, save_kv_cache)
        totals, new, masks = self._extend
        # MLA has stored keys and values itself, in their latent form, and expands them here
        expanded = (None, None) if save_kv_cache else (k, v)
        attention.extend_attention_cpu(
            q, *expanded, o, *self._buffers(layer), 1.0, 1.0, self._slot_table,
            batch.req_pool_indices, totals, new, torch.cumsum(new, 0) - new, 0, *_layer(layer),
            tree_mask=masks,
        )  # fmt: skip
        return o.flatten(1)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        q, o = self._store(q, k, v, layer, batch, save_kv_cache)
        table, rows, totals = self._slot_table, batch.req_pool_indices, batch.seq_lens
        if self.branches is not None:
            table, totals = self.branches
            rows = torch.arange(table.shape[0])
        attention.decode_attention_cpu(
            q, *self._buffers(layer), 1.0, 1.0, o, None, None, o, o, table, rows, totals,
            *_layer(layer),
        )  # fmt: skip
        return o.flatten(1)

    def support_triton(self) -> bool:
        return False

    def _store(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save: bool
    ) -> tuple[Tensor, Tensor]:
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if save:
            self._pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        return q, q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)

    def _buffers(self, layer: Any) -> tuple[Tensor, Tensor]:
        return (
            self._pool.get_key_buffer(layer.layer_id),
            self._pool.get_value_buffer(layer.layer_id),
        )


class BranchAttentionBackends:
    """Attention of the draft's decode steps, one backend per step."""

    def __init__(self, runner: Any, topk: int, steps: int) -> None:
        self._slot_table = runner.req_to_token_pool.req_to_token
        self._topk, self._steps = topk, steps
        self.attn_backends = [TreeAttentionBackend(runner) for _ in range(steps - 1)]

    def init_forward_metadata(self, batch: Any) -> None:
        table = attention.build_draft_decode_metadata_cpu(
            self._slot_table, batch.req_pool_indices, batch.seq_lens, self._topk, self._steps,
            self._slot_table.shape[1],
        )  # fmt: skip
        prefixes = batch.seq_lens.repeat_interleave(self._topk)
        for step, backend in enumerate(self.attn_backends, start=1):
            backend.branches = table, prefixes + step


def _among_new(batch: Any, nodes: int) -> Tensor:
    """The part of the trees' full masks that tells which new tokens see each other."""
    mask, parts, start = batch.spec_info.custom_mask, [], 0
    for prefix in batch.seq_lens.tolist():
        width = prefix + nodes
        parts.append(mask[start : start + nodes * width].view(nodes, width)[:, prefix:].flatten())
        start += nodes * width
    return torch.cat(parts)


def _layer(layer: Any) -> tuple[float, float, bool, int]:
    return layer.scaling, layer.logit_cap, layer.is_cross_attention, layer.sliding_window_size + 1
