"""The calls into SGLang around its spec-v1 worker whose form differs between releases.

As in `sglang_api`, each function decides by what it finds. Imported only where SGLang's serving
code is: it needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from sglang_spec_ext.compat import sglang_api


@dataclass(frozen=True)
class Draft:
    """The draft's side of a spec-v1 worker, which is worker and draft in one."""

    draft_runner: Any
    draft_tp_context: Any
    req_to_token_pool: Any


def draft_of(worker: Any) -> Draft:
    return Draft(worker.draft_model_runner, worker.draft_tp_context, worker.req_to_token_pool)


def reads_hidden(worker: Any) -> bool:
    """Whether the worker hands the target's hidden states to its draft.

    The first releases do so for STANDALONE too, whose draft ignores them.
    """
    first = not hasattr(sglang_api.resolve("draft_input"), "hidden_size_for")
    return first or not worker.speculative_algorithm.is_standalone()


@contextmanager
def plain(batch: Any) -> Iterator[None]:
    """SGLang takes the batch for one of a server that does not speculate, for as long."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm, batch.spec_algorithm = batch.spec_algorithm, SpeculativeAlgorithm.NONE
    try:
        yield
    finally:
        batch.spec_algorithm = algorithm


def plain_decode(target_worker: Any, batch: Any, tokens: torch.Tensor, hidden_mode: Any) -> Any:
    """One decode step of the target, from the allocation of its KV slots to the sampled tokens.

    Args:
        batch: SGLang's ScheduleBatch, inside `plain`; afterwards its lengths include this step and
            ``out_cache_loc`` is the slot of each request's token.
        tokens: [batch], the tokens to consume.
        hidden_mode: which of the target's hidden states come out.
    """
    batch.output_ids = tokens.to(torch.int64)
    # SGLang counts them up in place, and a step in flight has them
    batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens.clone(), batch.seq_lens_cpu.clone()
    # a verify leaves these as they were before it
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    batch.orig_seq_lens = batch.seq_lens.to(batch.orig_seq_lens.dtype, copy=True)
    batch.prepare_for_decode()
    # attention backends read DECODE together with a spec_info as a draft's decode
    spec_info, batch.spec_info = batch.spec_info, None
    try:
        forward = batch.get_model_worker_batch()
        forward.capture_hidden_mode = hidden_mode
        result = target_worker.forward_batch_generation(forward)
    finally:
        batch.spec_info = spec_info
    # the next verify would apply this step's grammar mask to its logits
    batch.sampling_info.vocab_mask = None
    return result


def needs_host(batch: Any) -> bool:
    """Whether the batch's next step needs this one's tokens, or all of its output, on the host."""
    return bool(
        batch.has_grammar
        or batch.return_hidden_states
        or batch.sampling_info.has_custom_logit_processor
    )


def copy_to_host(result: Any, batch: Any) -> None:
    """Start to copy what a commit reads of a target-only step; SGLang's commit waits for it.

    The hidden states are for the draft, which has them.
    """
    result.logits_output.hidden_states = None
    result.copy_done = torch.get_device_module(batch.device).Event()
    result.copy_to_cpu(return_logprob=batch.return_logprob)


@contextmanager
def skipping_ended(scheduler: Any) -> Iterator[None]:
    """A commit passes over requests that are finished or retracted, as in the overlap schedule."""
    overlap, scheduler.enable_overlap = scheduler.enable_overlap, True
    try:
        yield
    finally:
        scheduler.enable_overlap = overlap


def drop_finished(draft_input: Any, rows: list[Any]) -> list[Any]:
    """Take finished requests out of a draft input, as a verify does before the scheduler does.

    Args:
        rows: its request for each of its rows.

    Returns:
        The same for the rows that are left.

    Raises:
        RuntimeError: it has other rows, so whose they are is not known.
    """
    tokens = sglang_api.bonus_tokens(draft_input)
    if tokens.shape[0] != len(rows):
        raise RuntimeError(
            f"the draft input has {tokens.shape[0]} rows for {len(rows)} requests: something "
            "changed the running batch between two target-only steps"
        )
    kept = [i for i, request in enumerate(rows) if not request.finished()]
    if len(kept) < len(rows):
        # made there it would wait for the step in flight
        indices = torch.tensor(kept, dtype=torch.int64).to(tokens.device, non_blocking=True)
        draft_input.filter_batch(indices, has_been_filtered=False)
    return [rows[i] for i in kept]


def draft_extend(
    worker: Any, batch: Any, tokens: torch.Tensor, hidden: torch.Tensor | None
) -> None:
    """SGLang's draft extend of one token per request, as after a verify that accepted no draft.

    Args:
        batch: each request's row is at position ``seq_lens - 1``, its slot in ``out_cache_loc``;
            its draft input is complete afterwards.
        tokens: [batch], the token after that position.
        hidden: [batch, hidden width] of the target at that position, None if the draft reads none.
    """
    size, device = tokens.shape[0], tokens.device
    counts = {
        "drafts": torch.zeros(size, dtype=torch.int32, device=device),
        "tokens": torch.ones(size, dtype=torch.int32, device=device),
    }
    tokens = tokens.to(torch.int32)  # as a verify has them
    values = {
        "hidden_states": hidden,
        "verified_id": tokens,
        "accept_length": counts["drafts"],
        "num_accepted_drafts": counts["drafts"],
        "num_accepted_tokens": counts["tokens"],
        "seq_lens_for_draft_extend": batch.seq_lens,
        "seq_lens_for_draft_extend_cpu": batch.seq_lens_cpu,
        "req_pool_indices_for_draft_extend": batch.req_pool_indices,
        # from here on in releases with an input of its own for the extend
        "input_ids": tokens,
        "num_correct_drafts": counts["drafts"],
        "num_accept_tokens": counts["tokens"],
        "seq_lens": batch.seq_lens,
        "seq_lens_cpu": batch.seq_lens_cpu,
        "req_pool_indices": batch.req_pool_indices,
    }
    values |= {
        f"{name}_cpu": value.tolist()
        for name, value in values.items()
        if value is counts["drafts"] or value is counts["tokens"]
    }
    kind = _extend_input()
    known = {field.name for field in fields(kind)}
    batch.spec_info = kind(**{name: value for name, value in values.items() if name in known})
    made = worker.forward_draft_extend_after_decode(batch)
    if made is not None:
        batch.spec_info = made


def _extend_input() -> Any:
    from sglang.srt.speculative import eagle_info

    own = getattr(eagle_info, "EagleDraftExtendInput", None)
    return own if own is not None else sglang_api.resolve("draft_input")
