"""What a target-only step does outside of its CUDA graph, in one kernel before it and one after.

PyTorch takes five, one after the other, and the GPU waits some microseconds between each two.
"""

from __future__ import annotations

import torch


def reserved_slots(
    req_to_token: torch.Tensor, pool_indices: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KV slot that each request holds behind its last token, and its length with that token.

    SGLang has a kernel for the first that compiles anew for each power of two of requests, while
    requests wait.

    Args:
        req_to_token: [requests of the pool, positions] integer, the slots as SGLang keeps them.
        pool_indices: [batch] int64, rows of it.
        lengths: [batch] int64, below the number of positions.

    Returns:
        [batch] int64 each.
    """
    if not lengths.is_cuda:
        return req_to_token[pool_indices, lengths].to(torch.int64), lengths + 1
    from sglang_spec_ext.target_only import fused_kernels as kernels

    slots, longer = torch.empty_like(lengths), torch.empty_like(lengths)
    size, block = lengths.shape[0], kernels.REQUESTS
    kernels.reserved_slots[(-(-size // block),)](
        req_to_token, req_to_token.stride(0), pool_indices, lengths, slots, longer, size, block
    )
    return slots, longer


def keep_rows(
    into_hidden: torch.Tensor,
    into_columns: torch.Tensor,
    at: int,
    hidden: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Copy the rows of one step behind those that are there already.

    Args:
        into_hidden: [capacity, width], contiguous.
        into_columns: [4, capacity] int64, contiguous.
        at: row that the first one becomes.
        hidden: [rows, width], each row contiguous.
        columns: [rows] integer each.
    """
    rows, width = hidden.shape
    if not hidden.is_cuda:
        into_hidden[at : at + rows].copy_(hidden)
        for into, column in zip(into_columns, columns, strict=True):
            into[at : at + rows].copy_(column)
        return
    from sglang_spec_ext.target_only import fused_kernels as kernels

    block = kernels.WIDTH
    kernels.keep_rows[(rows, -(-width // block))](
        into_hidden,
        into_columns,
        into_columns.stride(0),
        at,
        hidden,
        hidden.stride(0),
        width,
        *(column.to(torch.int64) for column in columns),  # else one more to compile
        block,
    )
