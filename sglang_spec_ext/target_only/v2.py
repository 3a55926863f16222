"""The target-only step on SGLang's spec-v2 worker (`EAGLEWorkerV2`), and the way back.

One decode step of the target, without verify: the token that the last step left as *bonus* is
consumed at the slot that the scheduler has reserved for it, and the target samples the next one.
What SGLang expects of a speculative step is filled in around that. See docs/architecture.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from sglang_spec_ext import observe
from sglang_spec_ext.args import THRESHOLD_FLAG, Settings, SettingsError
from sglang_spec_ext.compat import sglang_api
from sglang_spec_ext.counts import Counts
from sglang_spec_ext.policy import BatchThresholdPolicy, Mode
from sglang_spec_ext.target_only.draft_kv import DraftKVWriter
from sglang_spec_ext.target_only.graphs import DraftKVGraphs, TargetGraphs, largest_threshold

Forward = Callable[..., Any]


class TargetOnlyStep:
    """Runs decode steps of one spec-v2 worker in the mode that the policy says.

    State: the policy, and for each request pool index the target's last hidden state. A row of the
    latter is valid for a request that was prefilled or stepped since the last switch to
    target-only, and a resume reads only such rows; so reuse of a pool index needs no cleaning up.
    """

    def __init__(self, worker: Any, settings: Settings) -> None:
        self.worker = worker
        self.counts = Counts()
        self.policy = BatchThresholdPolicy(settings, self.counts.step)
        self._draft: Any = worker.draft_worker
        if sglang_api.keeps_recurrent_state(self._draft.req_to_token_pool):
            raise SettingsError(
                f"{THRESHOLD_FLAG} {settings.threshold} does not work with this target: it has "
                "Mamba or linear-attention layers, whose state the target-only step does not "
                f"commit yet. Serve it without {THRESHOLD_FLAG}."
            )
        self._req_to_token: torch.Tensor = self._draft.req_to_token_pool.req_to_token
        reason = None if self._standalone else DraftKVWriter.why_not(self._draft.draft_runner)
        if self._standalone:
            reason = "a STANDALONE draft is a whole language model"
        self.own_extend_reason = reason
        self._writer = None if reason else DraftKVWriter(self._draft.draft_runner)
        self._last_hidden: torch.Tensor | None = None
        if self._writer is not None:
            self._last_hidden = torch.zeros(
                (self._req_to_token.shape[0], self._writer.hidden_width),
                dtype=self._writer.hidden_dtype,
                device=self._req_to_token.device,
            )
        self._stubs = _Stubs(worker)
        self._target_graphs: TargetGraphs | None = None
        self._write_graphs: DraftKVGraphs | None = None
        self._capture_graphs()
        self.largest_threshold = largest_threshold()
        observe.log_start(worker, settings, reason)

    def _capture_graphs(self) -> None:
        target_runner = self.worker.target_worker.model_runner
        if sglang_api.decode_graph_runner(target_runner) is None:
            return
        self._target_graphs = TargetGraphs(target_runner, self._stubs.target_capture)
        if self._writer is not None and self._last_hidden is not None:
            self._write_graphs = DraftKVGraphs(
                self._writer, self._last_hidden, self._target_graphs.sizes, self._draft
            )

    @property
    def _standalone(self) -> bool:
        return bool(self.worker.speculative_algorithm.is_standalone())

    def forward(self, original: Forward, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``EAGLEWorkerV2.forward_batch_generation(batch, *args, **kwargs)``."""
        if batch.forward_mode.is_idle():
            return original(self.worker, batch, *args, **kwargs)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(original, batch, *args, **kwargs)
        switch = self.policy.step(batch.seq_lens.shape[0])
        if switch is not None:
            observe.log_switch(switch, self.policy.settings)
        if self.policy.mode is Mode.TARGET_ONLY:
            return self._decode(batch, *args, **kwargs)
        if switch is not None:
            self._resume(batch)
        return original(self.worker, batch, *args, **kwargs)

    def _prefill(self, original: Forward, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self.worker, batch, *args, **kwargs)
        if self.policy.mode is Mode.TARGET_ONLY and self._last_hidden is not None:
            # this request's first decode may be the resume
            device = self._last_hidden.device
            lengths = torch.as_tensor(sglang_api.prefill_lengths(batch), device=device)
            last = torch.cumsum(lengths, dim=0) - 1
            self._last_hidden[batch.req_pool_indices] = result.logits_output.hidden_states[last]
        return result

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
        step.input_ids = batch.spec_info.bonus_tokens.to(torch.int64)
        # the scheduler reserved these slots when it prepared the decode; allocating again leaks
        step.out_cache_loc = sglang_api.reserved_slots(batch, self._req_to_token, start, 1)
        step.seq_lens = start + 1
        if batch.seq_lens_cpu is not None:
            step.seq_lens_cpu = batch.seq_lens_cpu + 1
        step.seq_lens_sum = None if batch.seq_lens_sum is None else batch.seq_lens_sum + size
        # attention backends read DECODE together with a spec_info as a draft's decode
        step.spec_info = None
        step.forward_mode = type(batch.forward_mode).DECODE
        with self._target_graphs.in_place() if self._target_graphs else nullcontext():
            result = sglang_api.target_forward(
                self.worker.target_worker, step, self._stubs.target_capture
            )
        result.next_draft_input = self._stubs.draft_input(size, result.next_token_ids)
        sglang_api.announce_lengths(result, step.seq_lens, on_publish)

        result.accept_lens = self._stubs.ones(size)
        result.speculative_num_draft_tokens = 1
        if batch.return_logprob:
            _one_column(result.logits_output)
        observe.mark_target_only(result)

        hidden = result.logits_output.hidden_states
        if self._last_hidden is None:
            self._draft_extend(batch, start, result.next_token_ids, hidden, result.next_draft_input)
            self.counts.warmed(size)
            return result
        self._last_hidden[batch.req_pool_indices] = hidden
        self._write_draft_kv(
            result.next_token_ids.to(torch.int64), batch.req_pool_indices, start, step.out_cache_loc
        )
        self.counts.warmed(size)
        return result

    def _write_draft_kv(
        self,
        tokens: torch.Tensor,
        pool_indices: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        if self._write_graphs is not None and self._write_graphs.fits(tokens.shape[0]):
            self._write_graphs.write(tokens, pool_indices, positions, slots)
            return
        assert self._writer is not None and self._last_hidden is not None
        with sglang_api.draft_contexts(self._draft):
            self._writer.write(tokens, self._last_hidden[pool_indices], positions, slots)

    def _resume(self, batch: Any) -> None:
        """Give the next draft its first proposals: draft extend of each last committed token.

        It writes the KV slot that is already there with the same values, and yields top-k and
        hidden state, as after a verify that accepted no draft token.
        """
        if self._last_hidden is None:
            return  # SGLang's own extend ran on every step: the draft input is complete
        hidden = self._last_hidden[batch.req_pool_indices]
        self._draft_extend(
            batch, batch.seq_lens - 1, batch.spec_info.bonus_tokens, hidden, batch.spec_info
        )

    def _draft_extend(
        self,
        batch: Any,
        start: torch.Tensor,
        tokens: torch.Tensor,
        hidden: torch.Tensor | None,
        into: Any,
    ) -> None:
        """SGLang's draft extend of one token per request, in the width for which it is built.

        Args:
            start: [batch] int64, position of each token's row.
            tokens: [batch], the token after that position.
            hidden: [batch, hidden width] at that position, None for a draft that reads none.
            into: draft input that receives top-k and hidden state.
        """
        size, width = start.shape[0], self.worker.speculative_num_draft_tokens
        view = copy.copy(batch)
        view.forward_mode = type(batch.forward_mode).DECODE
        view.seq_lens = start
        if batch.seq_lens_cpu is not None:
            view.seq_lens_cpu = start.to("cpu")
            view.seq_lens_sum = int(view.seq_lens_cpu.sum())
        view.out_cache_loc = sglang_api.reserved_slots(batch, self._req_to_token, start, width)
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
        standalone = worker.speculative_algorithm.is_standalone()
        self.target_capture = CaptureHiddenMode.NULL if standalone else CaptureHiddenMode.FULL
        pool_size = worker.draft_worker.req_to_token_pool.req_to_token.shape[0]
        device, topk = worker.device, worker.topk
        self._ones = torch.ones(pool_size, dtype=torch.int32, device=device)
        self._topk_p = torch.zeros((1, topk), dtype=torch.float32, device=device)
        self._topk_index = torch.zeros((1, topk), dtype=torch.int64, device=device)
        width, dtype = sglang_api.recurrent_hidden(worker.draft_worker)
        self._hidden = None
        if width is not None and not standalone:
            self._hidden = torch.zeros((1, width), dtype=dtype, device=device)

    def ones(self, size: int) -> torch.Tensor:
        return self._ones[:size]

    def draft_input(self, size: int, bonus_tokens: torch.Tensor) -> Any:
        """Draft input of ``size`` requests; the relay and filter/merge index all its tensors."""
        return self._draft_input_class(
            topk_p=self._topk_p.expand(size, -1),
            topk_index=self._topk_index.expand(size, -1),
            hidden_states=None if self._hidden is None else self._hidden.expand(size, -1),
            bonus_tokens=bonus_tokens,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
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
