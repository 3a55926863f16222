"""The target-only step on SGLang's spec-v1 worker (`EAGLEWorker`), and the way back.

That worker allocates KV slots for a step itself and commits its tokens inside verify: output ids,
stop conditions, grammars, log probabilities. A target-only step has SGLang do all of it with its
own code for a server without speculation, by showing it the batch as one: here for allocation,
forward and sampling, and in `process_decode` for what the scheduler does with the tokens, while
the next step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_spec_ext import observe
from sglang_spec_ext.args import Settings
from sglang_spec_ext.compat import sglang_api, sglang_v1
from sglang_spec_ext.policy import Mode
from sglang_spec_ext.target_only.in_flight import InFlight
from sglang_spec_ext.target_only.step import Forward, Step


class TargetOnlyStep(Step):
    """The target-only step of one spec-v1 worker."""

    def __init__(self, worker: Any, settings: Settings) -> None:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        super().__init__(worker, settings, sglang_v1.draft_of(worker))
        reads_hidden = sglang_v1.reads_hidden(worker)
        self._hidden_mode = CaptureHiddenMode.FULL if reads_hidden else CaptureHiddenMode.NULL
        self._in_flight = InFlight(self._committed)
        self._start(self._hidden_mode)

    def _committed(self, tokens: int) -> None:
        self.counts.committed(Mode.TARGET_ONLY, tokens, tokens)
        self.counts.warmed(tokens)

    def process_decode(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any
    ) -> Any:
        """Stand in for the scheduler's ``process_batch_result_decode(batch, result)``.

        For a speculative server that leaves out what a verify has done; after a target-only step
        there was no verify, and the scheduler does it as for a plain server.
        """
        if not observe.is_target_only(result):
            return original(scheduler, batch, result)
        stays = self.policy.mode is Mode.TARGET_ONLY and not sglang_v1.needs_host(batch)
        return self._in_flight.launched(original, scheduler, batch, result, stays=stays)

    def _can_resume(self) -> bool:
        # of a step in flight nobody knows yet which requests it ends
        return not self._in_flight

    def _prefill(self, original: Forward, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._in_flight.land(preparing=batch.reqs)
        return super()._prefill(original, batch, *args, **kwargs)

    def _decode(self, batch: Any, *_: Any, **__: Any) -> Any:
        target, runner = self.worker.target_worker, self.worker.target_worker.model_runner
        positions = batch.seq_lens
        draft_input = batch.spec_info
        if self._target_graphs is not None:
            placed = self._target_graphs.in_place()
        else:
            # whatever graphs there are would be replayed, and those verify
            placed = sglang_api.decoding_on(runner, runner.attn_backend, None)
        with sglang_v1.plain(batch), placed:
            bonus = sglang_api.bonus_tokens(draft_input)
            result = sglang_v1.plain_decode(target, batch, bonus, self._hidden_mode)
        observe.mark_target_only(result)

        tokens = result.next_token_ids.to(torch.int64)
        # all else in the draft input is stale until the resume, and of the right shape
        setattr(draft_input, sglang_api.bonus_field(draft_input), tokens)
        hidden = result.logits_output.hidden_states
        if self._warm_draft is None:
            self._draft_extend(batch, tokens, hidden)
        else:
            self._warm_draft.stepped(
                batch.req_pool_indices, tokens, hidden, positions, batch.out_cache_loc
            )
        return result

    def _resume(self, batch: Any) -> None:
        if self._warm_draft is None:
            return  # SGLang's own extend ran on every step: the draft input is complete
        batch.out_cache_loc = self._reserved_slots(batch, batch.seq_lens - 1)
        hidden = self._warm_draft.last_hidden(batch.req_pool_indices)
        self._draft_extend(batch, sglang_api.bonus_tokens(batch.spec_info), hidden)

    def _draft_extend(self, batch: Any, tokens: torch.Tensor, hidden: torch.Tensor | None) -> None:
        with sglang_api.draft_contexts(self._draft):
            sglang_v1.draft_extend(self.worker, batch, tokens, hidden)
