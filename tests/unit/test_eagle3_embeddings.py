"""What a draft sees of an image: what its target embedded there, one token on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the hooks work on tensors")

import torch

from sglang_spec_ext.eagle3_hooks import embeddings

WIDTH, VOCAB = 4, 10
IMAGE = -1
"""Stands for a place of an image among ids; its row of the target's embeddings is its own."""


def draft(width: int = WIDTH) -> Any:
    looked_up: list[int] = []

    def embed(ids: Any) -> Any:
        looked_up.extend(ids.tolist())
        return embed.weight[ids]  # type: ignore[attr-defined]

    weight = torch.arange(VOCAB * width, dtype=torch.float32).view(VOCAB, width)
    embed.weight = weight  # type: ignore[attr-defined]
    return SimpleNamespace(embed_tokens=embed, looked_up=looked_up)


def as_the_target_embeds(ids: list[int]) -> Any:
    """Rows of the vocabulary, and for an image rows that are none of them."""
    weight = draft().embed_tokens.weight
    image = -100.0 - torch.arange(WIDTH)
    return torch.stack([weight[i] if i != IMAGE else image - p for p, i in enumerate(ids)])


def prefill(lengths: list[int], embeds: Any) -> Any:
    sizes = torch.tensor(lengths)
    return SimpleNamespace(
        extend_seq_lens=sizes, extend_start_loc=sizes.cumsum(0) - sizes, mm_input_embeds=embeds
    )


def seen(model: Any, ids: list[int], batch: Any, given: Any = None) -> Any:
    """The embeddings that SGLang's forward of the draft is called with; None: it looks up ids."""
    calls: list[Any] = []

    def forward(
        it: Any, input_ids: Any, positions: Any, forward_batch: Any, embeds: Any, **kwargs: Any
    ) -> str:
        assert (it, positions, forward_batch) == (model, "positions", batch)
        assert kwargs == {"pp_proxy_tensors": None}
        calls.append(embeds)
        return "out"

    ran = embeddings.draft_forward(
        forward, model, torch.tensor(ids), "positions", batch, given, pp_proxy_tensors=None
    )
    assert ran == "out"
    (embeds,) = calls
    return embeds


@pytest.mark.parametrize(
    "requests",
    [
        [[3, IMAGE, IMAGE, 5]],
        [[IMAGE, 2]],
        [[7]],
        # neighbours of an image keep to themselves, whatever their lengths
        [[3, IMAGE, IMAGE, 5], [8, 9, 1], [6], [2, IMAGE]],
    ],
    ids=str,
)
def test_row_p_is_what_the_target_embedded_for_token_p_plus_1(requests: list[list[int]]) -> None:
    sampled = [4 + n for n in range(len(requests))]
    target = as_the_target_embeds([i for request in requests for i in request])
    clamped = [
        max(i, 0) for ids, new in zip(requests, sampled, strict=True) for i in [*ids[1:], new]
    ]
    model = draft()
    embeds = seen(model, clamped, prefill([len(ids) for ids in requests], target))
    row = 0
    for ids, new in zip(requests, sampled, strict=True):
        end = row + len(ids) - 1
        assert embeds[row:end].equal(target[row + 1 : end + 1])
        assert embeds[end].equal(model.embed_tokens.weight[new])
        row = end + 1
    assert model.looked_up == sampled


def test_padding_at_the_end_of_a_batch_stays_empty() -> None:
    target = as_the_target_embeds([3, IMAGE, 5])
    embeds = seen(draft(), [0, 5, 4, 0, 0], prefill([3], target))
    assert embeds.shape == (5, WIDTH)
    assert embeds[:2].equal(target[1:]) and not embeds[3:].any()


def test_the_embeddings_come_in_the_drafts_own_dtype() -> None:
    model = draft()
    model.embed_tokens.weight = model.embed_tokens.weight.bfloat16()
    embeds = seen(model, [0, 4], prefill([2], as_the_target_embeds([3, IMAGE])))
    assert embeds.dtype == torch.bfloat16


def test_what_the_layers_did_to_the_embeddings_is_not_seen() -> None:
    """On a GPU the target's norms write the residual over what they were given."""
    target = as_the_target_embeds([3, IMAGE, 5])
    before = target.clone()
    made = embeddings.embed_mm_inputs(lambda *_, **__: (target, {"other": 1}), "inputs", lens=[3])
    assert made[0] is target and made[1] == {"other": 1}
    target.add_(1000)
    assert seen(draft(), [0, 5, 4], prefill([3], target))[:2].equal(before[1:])


def test_without_media_nothing_is_kept() -> None:
    assert embeddings.embed_mm_inputs(lambda inputs: None, None) is None


def test_text_alone_is_left_to_sglang() -> None:
    model = draft()
    assert seen(model, [1, 2], prefill([2], None)) is None
    assert model.looked_up == []


def test_embeddings_that_sglang_gives_itself_stay() -> None:
    given = torch.zeros(2, WIDTH)
    assert seen(draft(), [1, 2], prefill([2], as_the_target_embeds([3, IMAGE])), given) is given


def test_a_draft_of_another_width_is_left_to_sglang() -> None:
    batch = prefill([2], as_the_target_embeds([3, IMAGE]))
    assert seen(draft(WIDTH // 2), [1, 2], batch) is None
