"""The kernels around a target-only step do what their PyTorch forms do, whatever the sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the kernels work on tensors")

from sglang_spec_ext.target_only import fused  # noqa: E402


def test_the_slot_behind_the_last_token_and_the_length_with_it() -> None:
    req_to_token = torch.arange(40, dtype=torch.int32).reshape(4, 10)
    lengths = torch.tensor([0, 9, 3])
    slots, longer = fused.reserved_slots(req_to_token, torch.tensor([2, 0, 3]), lengths)
    assert (slots.tolist(), longer.tolist()) == ([20, 9, 33], [1, 10, 4])
    assert (slots.dtype, longer.dtype) == (torch.int64, torch.int64)
    assert lengths.tolist() == [0, 9, 3]


def test_rows_are_kept_behind_those_that_are_there() -> None:
    hidden, columns = torch.full((4, 2), 9.0), torch.full((4, 4), 9)
    one = torch.tensor([1, 2])
    tokens = one.to(torch.int32)  # as some samplers have them
    given = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    fused.keep_rows(hidden, columns, 1, given, (tokens, one + 2, one + 4, one + 6))
    assert hidden.tolist() == [[9.0, 9.0], [0.0, 1.0], [2.0, 3.0], [9.0, 9.0]]
    assert columns.tolist() == [[9, 1, 2, 9], [9, 3, 4, 9], [9, 5, 6, 9], [9, 7, 8, 9]]


# In a process of its own: Triton decides when it is imported whether it interprets.
_COMPARISON = """
import torch
from sglang_spec_ext.target_only import fused, fused_kernels

torch.manual_seed(0)
numbers = lambda *shape, below=10**12: torch.randint(below, shape)


class OnGpu(torch.Tensor):
    is_cuda = True


def on_gpu(*tensors):
    return [tensor.clone().as_subclass(OnGpu) for tensor in tensors]


def same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        one = one.as_subclass(torch.Tensor)
        assert one.dtype == other.dtype and torch.equal(one, other), (one, other)


pool = torch.randint(2**31 - 1, (50, 300), dtype=torch.int32)
for size in (1, 5, fused_kernels.REQUESTS, fused_kernels.REQUESTS + 1):
    given = pool, numbers(size, below=50), numbers(size, below=300)
    same(fused.reserved_slots(*on_gpu(*given)), fused.reserved_slots(*given))
for rows, width, at in ((1, 3, 0), (5, fused_kernels.WIDTH, 7), (3, fused_kernels.WIDTH + 5, 29)):
    hidden = torch.randn(rows, width).to(torch.bfloat16)
    columns = numbers(rows).to(torch.int32), numbers(rows), numbers(rows), numbers(rows)
    expected = torch.ones(32, width, dtype=torch.bfloat16), torch.ones(4, 32, dtype=torch.int64)
    ours = on_gpu(*expected)
    fused.keep_rows(*expected, at, hidden, columns)
    fused.keep_rows(*ours, at, *on_gpu(hidden), columns)
    same(ours, expected)
    assert expected[0][at - 1 if at else -1].eq(1).all()
print("the kernels agree")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_by_tritons_interpreter() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _COMPARISON],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.stdout == "the kernels agree\n", answer.stderr
