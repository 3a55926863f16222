"""The kernels of `fused`, apart from it since SGLang on a CPU need not have Triton.

Each is compiled once in a process: numbers that change from step to step, and tensors that may lie
anywhere, are not specialized on.
"""

from __future__ import annotations

import triton
import triton.language as tl

REQUESTS = 128
"""Requests that one program of `reserved_slots` takes."""
WIDTH = 1024
"""Elements of a row that one program of `keep_rows` takes."""


@triton.jit(
    do_not_specialize=["row_stride", "size"],
    do_not_specialize_on_alignment=["req_to_token", "pool_indices", "lengths", "slots", "longer"],
)
def reserved_slots(  # type: ignore[no-untyped-def]
    req_to_token, row_stride, pool_indices, lengths, slots, longer, size, block: tl.constexpr
):
    """``slots`` and ``longer`` are what `fused.reserved_slots` returns."""
    request = tl.program_id(0) * block + tl.arange(0, block)
    there = request < size
    row = tl.load(pool_indices + request, mask=there, other=0)
    length = tl.load(lengths + request, mask=there, other=0)
    slot = tl.load(req_to_token + row * row_stride + length, mask=there, other=0)
    tl.store(slots + request, slot.to(tl.int64), mask=there)
    tl.store(longer + request, length + 1, mask=there)


@triton.jit(
    do_not_specialize=["at"],
    do_not_specialize_on_alignment=["tokens", "positions", "slots", "pool_indices"],
)
def keep_rows(  # type: ignore[no-untyped-def]
    into_hidden, into_columns, capacity, at, hidden, hidden_stride, width,
    tokens, positions, slots, pool_indices, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * block + tl.arange(0, block)
    inside = element < width
    value = tl.load(hidden + row * hidden_stride + element, mask=inside)
    tl.store(into_hidden + (at + row) * width + element, value, mask=inside)
    if tl.program_id(1) == 0:
        into = into_columns + at + row
        tl.store(into, tl.load(tokens + row))
        tl.store(into + capacity, tl.load(positions + row))
        tl.store(into + 2 * capacity, tl.load(slots + row))
        tl.store(into + 3 * capacity, tl.load(pool_indices + row))
