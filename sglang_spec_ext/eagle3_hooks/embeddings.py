"""Let the draft see of an image or audio what its target sees. Imports no torch.

Row p of a draft's prefill takes the embedding of token p + 1. Where an image or audio is, the ids
are placeholders, and what counts is the embedding that the target put there. Up to 0.5.12.post1
SGLang's spec-v1 worker hands those embeddings to the draft, and then

- the 0.5.9 draft does not look at them: it embeds the ids, which the target has clamped to the last
  one of the vocabulary;
- later drafts take them as they are, row p for token p, for the whole prompt and its neighbours;
- on a GPU they are no embeddings any more: the target's norms add every layer's output to them.

Nothing fails. Drafts after an image are rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_AS_EMBEDDED = "_spec_ext_as_embedded"


def embed_mm_inputs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the function that makes a target's embeddings: keeps a copy with the tensor.

    Returns:
        What SGLang returns: embeddings [tokens, width], None without media, and other things.
    """
    made = original(*args, **kwargs)
    if made is not None:
        embeds, *_ = made
        setattr(embeds, _AS_EMBEDDED, embeds.clone())
    return made


def draft_forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: Any,
    positions: Any,
    forward_batch: Any,
    input_embeds: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Around the forward of an EAGLE-3 draft: gives it what the target embedded, one token on.

    Does nothing where the target embedded text alone, nor for a draft whose own embeddings have
    another width, which image embeddings of the target's cannot stand in for.
    """
    embeds = forward_batch.mm_input_embeds
    if input_embeds is None and embeds is not None:
        embeds = getattr(embeds, _AS_EMBEDDED, embeds)
        if embeds.shape[-1] == model.embed_tokens.weight.shape[-1]:
            input_embeds = _one_token_on(model, input_ids, forward_batch, embeds)
    return original(model, input_ids, positions, forward_batch, input_embeds, *rest, **kwargs)


def _one_token_on(model: Any, input_ids: Any, forward_batch: Any, embeds: Any) -> Any:
    """Embeddings [ids, width] for the draft's ids, which are the target's one token on.

    The last id of each request is what the target has just sampled, so nobody embedded it yet.
    """
    # under DP attention a batch ends in padding, of which the target's embeddings have none
    shifted = model.embed_tokens.weight.new_zeros(input_ids.shape[0], embeds.shape[-1])
    shifted[: embeds.shape[0] - 1] = embeds[1:]
    last = (forward_batch.extend_start_loc + forward_batch.extend_seq_lens - 1).long()
    shifted[last] = model.embed_tokens(input_ids[last])
    return shifted
