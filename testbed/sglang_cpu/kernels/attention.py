"""Attention over the paged KV cache, one request at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Attention of new tokens to their prefix and to each other; writes `o`.

    q, o: [new tokens of all requests, heads, head dim]. The caller has stored the new keys and
    values in the buffers [slots, kv heads, head dim] already; for MLA without a prefix, what it
    stored is their latent form, and k and v [new tokens, heads, head dim] are what to attend to.
    seq_lens counts prefix and new tokens. tree_mask: the requests' [new, new] visibility matrices,
    one after the other.
    """
    _refuse_unused(k_scale, v_scale, logit_cap, is_cross_attn, sliding_window, sinks)
    mask_start = 0
    for request, (total, new, start) in enumerate(
        zip(seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist(), strict=True)
    ):
        visible = torch.ones(new, total, dtype=torch.bool)
        if tree_mask is not None:
            among_new = tree_mask[mask_start : mask_start + new * new].view(new, new)
            visible[:, total - new :] = among_new.bool()
            mask_start += new * new
        elif is_causal:
            visible = visible.tril(total - new)
        slots = req_to_token[req_pool_indices[request], :total].long()
        rows = slice(start, start + new)
        if k is not None and v is not None and total == new:
            keys, values = k[rows], v[rows]
        else:
            keys, values = k_buffer[slots], v_buffer[slots]
        o[rows] = _attend(q[rows], keys, values, sm_scale, visible)


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attention of one new token per request; writes `o` [requests, heads, head dim].

    Unlike `extend_attention_cpu` it stores the new keys and values at `loc` itself. seq_lens
    counts the new token.
    """
    _refuse_unused(k_scale, v_scale, logit_cap, is_cross_attn, sliding_window, sinks)
    if k is not None and v is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for request, total in enumerate(seq_lens.tolist()):
        slots = req_to_token[req_pool_indices[request], :total].long()
        row = slice(request, request + 1)
        o[row] = _attend(q[row], k_buffer[slots], v_buffer[slots], sm_scale, None)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A slot table with one row per branch of the draft tree: [requests * topk, pool_len].

    A branch sees its request's prefix, then its own `num_steps` slots out of the request's
    topk * num_steps slots behind the prefix. The rest of a row is never read.
    """
    table = req_to_token.new_zeros(len(req_pool_indices) * topk, pool_len)
    for request, prefix in enumerate(seq_lens.tolist()):
        slots = req_to_token[req_pool_indices[request]]
        rows = table[request * topk : (request + 1) * topk]
        rows[:, :prefix] = slots[:prefix]
        own = slots[prefix : prefix + topk * num_steps].view(topk, num_steps)
        rows[:, prefix : prefix + num_steps] = own
    return table


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    """q [new, heads, dim], k and v [total, kv heads, dim], visible [new, total] or None for all."""
    q, k, v = (x.to(q.dtype).transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _refuse_unused(
    k_scale: float,
    v_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    sinks: Tensor | None,
) -> None:
    asked = {
        "KV scales": k_scale != 1.0 or v_scale != 1.0,
        "logit cap": logit_cap > 0,
        "cross attention": is_cross_attn,
        "sliding window": sliding_window > 0,
        "attention sinks": sinks is not None,
    }
    if any(asked.values()):
        names = ", ".join(name for name, used in asked.items() if used)
        raise NotImplementedError(f"the CPU test bed's attention has no {names}")
