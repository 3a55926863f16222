"""The target-only step on SGLang's spec-v2 worker (`EAGLEWorkerV2`), and the way back.

One decode step of the target, without verify: the token that the last step left as *bonus* is
consumed at the slot that the scheduler has reserved for it, and the target samples the next one.
What SGLang expects of a speculative step is filled in around that. See docs/architecture.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from sglang_spec_ext import observe
from sglang_spec_ext.args import Settings
from sglang_spec_ext.compat import sglang_api
from sglang_spec_ext.target_only import fused
from sglang_spec_ext.target_only.step import Forward, Step


class TargetOnlyStep(Step):
    """The target-only step of one spec-v2 worker."""

    def __init__(self, worker: Any, settings: Settings) -> None:
        super().__init__(worker, settings, worker.draft_worker)
        self._relay: sglang_api.Relay | None = None
        self._stubs = _Stubs(worker)
        self._shared_reads = sglang_api.SharedReads(worker)
        self._start(self._stubs.target_capture)
        none = torch.zeros(1, dtype=torch.int64, device=self._req_to_token.device)
        fused.reserved_slots(self._req_to_token, none, none)  # else it compiles while requests wait

    def attach(self, scheduler: Any) -> None:
        self._relay = sglang_api.Relay.of(scheduler)

    def forward(self, original: Forward, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._relay is not None:
            self._relay.take_all()
        return super().forward(original, batch, *args, **kwargs)

    def _decode(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        **_: Any,
    ) -> Any:
        if batch.has_grammar and grammar_barrier is not None:
            # the previous step's tokens must have advanced the grammar before this mask is built
            grammar_barrier()
        start, size = batch.seq_lens, batch.seq_lens.shape[0]
        step = copy.copy(batch)
        step.input_ids = sglang_api.bonus_tokens(batch.spec_info).to(torch.int64)
        # the scheduler reserved these slots when it prepared the decode; allocating again leaks
        step.out_cache_loc, step.seq_lens = fused.reserved_slots(
            self._req_to_token, batch.req_pool_indices, start
        )
        if batch.seq_lens_cpu is not None:
            step.seq_lens_cpu = batch.seq_lens_cpu + 1
        step.seq_lens_sum = None if batch.seq_lens_sum is None else batch.seq_lens_sum + size
        # attention backends read DECODE together with a spec_info as a draft's decode
        step.spec_info = None
        step.forward_mode = type(batch.forward_mode).DECODE
        # a verify has to run before its lengths are known; these are, and the scheduler prepares
        # the next step while this one runs
        if on_publish is not None:
            on_publish(step.seq_lens)
        with ExitStack() as stack:
            if self._target_graphs is not None:
                stack.enter_context(self._target_graphs.in_place())
            if self._warm_draft is not None:
                stack.enter_context(self._shared_reads.end_with_target())
            result = sglang_api.target_forward(
                self.worker.target_worker, step, self._stubs.target_capture
            )
        tokens = result.next_token_ids
        if self._only_tokens():
            result.next_draft_input = self._stubs.tokens(tokens)
        else:
            result.next_draft_input = self._stubs.draft_input(size, tokens)
        sglang_api.attach_lengths(result, step.seq_lens)

        result.accept_lens = self._stubs.accept_lens(size)
        sglang_api.one_token_per_request(result, self.worker.speculative_num_draft_tokens)
        if batch.return_logprob:
            _one_column(result.logits_output)
        observe.mark_target_only(result)

        hidden = result.logits_output.hidden_states
        if self._warm_draft is None:
            self._draft_extend(batch, 0, tokens, hidden, result.next_draft_input)
        else:
            self._warm_draft.stepped(
                batch.req_pool_indices, tokens, hidden, start, step.out_cache_loc
            )
        self.counts.warmed(size)
        return result

    def _only_tokens(self) -> bool:
        """Whether the next step gets no more than the tokens of this one: without a draft extend
        there is nothing else, and the resume makes it for all requests alike."""
        return (
            self._warm_draft is not None and self._relay is not None and self._relay.take_tokens()
        )

    def _resume(self, batch: Any) -> None:
        if self._warm_draft is None:
            return  # SGLang's own extend ran on every step: the draft input is complete
        hidden = self._warm_draft.last_hidden(batch.req_pool_indices)
        tokens = sglang_api.bonus_tokens(batch.spec_info)
        self._draft_extend(batch, 1, tokens, hidden, batch.spec_info)

    def _draft_extend(
        self,
        batch: Any,
        back: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor | None,
        into: Any,
    ) -> None:
        """SGLang's draft extend of one token per request, in the width for which it is built.

        Args:
            back: how many positions before the end of its request each row is.
            tokens: [batch], the token after that position.
            hidden: [batch, hidden width] at that position, None for a draft that reads none.
            into: draft input that receives top-k and hidden state.
        """
        start = batch.seq_lens - back
        size, width = start.shape[0], self.worker.speculative_num_draft_tokens
        view = copy.copy(batch)
        view.forward_mode = type(batch.forward_mode).DECODE
        view.seq_lens = start
        if batch.seq_lens_cpu is not None:
            view.seq_lens_cpu = batch.seq_lens_cpu - back
            view.seq_lens_sum = int(view.seq_lens_cpu.sum())
        columns = start[:, None] + torch.arange(width, device=start.device)
        view.out_cache_loc = self._reserved_slots(batch, columns).flatten()
        # Row 0 of each request is the token; the rest is what rejected drafts are after a verify:
        # overwritten by the next steps before anything reads it.
        rows = torch.zeros(size * width, dtype=torch.int64, device=start.device)
        rows[::width] = tokens.to(torch.int64)
        wide = None
        if hidden is not None:
            wide = hidden.new_zeros(size * width, hidden.shape[-1])
            wide[::width] = hidden
        result = self._stubs.result(rows, wide, self._stubs.ones(size), start + 1, into)
        with sglang_api.draft_contexts(self._draft):
            self._draft._draft_extend_for_decode(view, result)


class _Stubs:
    """The parts of SGLang's result contract that a target-only step has nothing to say about.

    They are constants, so a step hands out views of the same memory.
    """

    def __init__(self, worker: Any) -> None:
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        self._result_class = GenerationBatchResult
        self._output_class = _logits_output_class()
        self._draft_input_class = sglang_api.resolve("draft_input")
        pool_size = worker.draft_worker.req_to_token_pool.req_to_token.shape[0]
        device, topk = worker.device, worker.topk
        self._ones = torch.ones(pool_size, dtype=torch.int32, device=device)
        self._accept_lens = torch.ones(pool_size, dtype=torch.int32)
        self._topk_p = torch.zeros((1, topk), dtype=torch.float32, device=device)
        self._topk_index = torch.zeros((1, topk), dtype=torch.int64, device=device)
        width, dtype = sglang_api.recurrent_hidden(worker.draft_worker)
        self.target_capture, self._hidden = CaptureHiddenMode.NULL, None
        if width is not None:
            self.target_capture = CaptureHiddenMode.FULL
            self._hidden = torch.zeros((1, width), dtype=dtype, device=device)

    def ones(self, size: int) -> torch.Tensor:
        return self._ones[:size]

    def accept_lens(self, size: int) -> torch.Tensor:
        """On the host, where the scheduler reads them."""
        return self._accept_lens[:size]

    def draft_input(self, size: int, bonus_tokens: torch.Tensor) -> Any:
        """Draft input of ``size`` requests; the relay and filter/merge index all its tensors."""
        return self.tokens(
            bonus_tokens,
            topk_p=self._topk_p.expand(size, -1),
            topk_index=self._topk_index.expand(size, -1),
            hidden_states=None if self._hidden is None else self._hidden.expand(size, -1),
        )

    def tokens(self, bonus_tokens: torch.Tensor, **more: Any) -> Any:
        """Draft input of nothing but the tokens, for a relay that takes no more."""
        return self._draft_input_class(
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
            **{sglang_api.bonus_field(self._draft_input_class): bonus_tokens},
            **more,
        )

    def result(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor | None,
        accept_lens: torch.Tensor,
        new_seq_lens: torch.Tensor,
        draft_input: Any,
    ) -> Any:
        """What a verify hands to SGLang's draft extend."""
        result = self._result_class(
            logits_output=self._output_class(next_token_logits=None, hidden_states=hidden),
            next_token_ids=tokens,
            accept_lens=accept_lens,
            next_draft_input=draft_input,
        )
        result.new_seq_lens = new_seq_lens  # no field of every release
        return result


def _logits_output_class() -> Any:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    return LogitsProcessorOutput


def _one_column(logits_output: Any) -> None:
    # a speculative step reports log probabilities as [batch, tokens per request]
    if logits_output.next_token_logprobs is not None:
        logits_output.next_token_logprobs = logits_output.next_token_logprobs.unsqueeze(1)
