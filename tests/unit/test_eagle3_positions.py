"""A draft's decode steps are at the positions that follow its prefill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the hook works on tensors")

import torch

from sglang_spec_ext.eagle3_hooks import positions


def stepped(worker: Any, forward_batch: Any) -> list[list[int]]:
    """As SGLang's loop: it advances before each step, of which the last draft token needs none."""
    seen = []
    for _ in range(worker.speculative_num_steps - 1):
        forward_batch.positions.add_(1)
        seen.append(forward_batch.positions.tolist())
    return seen


def test_the_first_step_is_at_the_sequence_length() -> None:
    batch = SimpleNamespace(positions=torch.tensor([7, 7, 20, 20]))  # two requests, topk 2
    worker = SimpleNamespace(speculative_num_steps=3)
    ran = positions.draft_forward(stepped, worker, batch)
    assert ran == [[7, 7, 20, 20], [8, 8, 21, 21]]


def test_a_draft_of_one_token_has_no_position() -> None:
    batch = SimpleNamespace(positions=None)
    worker = SimpleNamespace(speculative_num_steps=1)
    assert positions.draft_forward(stepped, worker, batch) == []
