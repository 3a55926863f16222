"""Bookkeeping of KV slots: which slots a step uses, keeps and moves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Enter freshly allocated slots, packed by request, in the requests' rows [start, end)."""
    spans = _spans(req_pool_indices, start_offset, end_offset)
    for request, start, end, packed in spans:
        req_to_token[request, start:end] = out_cache_loc[packed].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The reverse: read the requests' rows [start, end) into `out_cache_loc`, packed by request."""
    spans = _spans(req_pool_indices, start_offset, end_offset)
    for request, start, end, packed in spans:
        out_cache_loc[packed] = req_to_token[request, start:end].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The topk * num_steps slots behind each request's prefix, packed by request."""
    end_offset = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, end_offset, out_cache_loc, pool_len
    )


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request; accept_tokens holds accept_stride per request."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """The accepted tokens' slots, packed to the front; accept_index is -1 where none accepted."""
    accepted = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy slots src_loc to tgt_loc in every buffer; `strides` are bytes per slot.

    All slots of a buffer are read before the first is written, since the two lists may overlap.
    The buffers come as addresses only, hence ctypes.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for buffer, stride in zip(data_ptrs.view(torch.int64).tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(buffer + slot * stride, stride) for slot in sources]
        for slot, content in zip(targets, slots, strict=True):
            ctypes.memmove(buffer + slot * stride, content, stride)


def _spans(
    req_pool_indices: Tensor, start_offset: Tensor, end_offset: Tensor
) -> Iterator[tuple[int, int, int, slice]]:
    """Per request: its row, the span [start, end) in it, and the span's place when packed."""
    offset = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        yield request, start, end, slice(offset, offset + end - start)
        offset += end - start
