"""What the target-only steps of all speculative workers have in common: when, and a warm draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from sglang_spec_ext import observe
from sglang_spec_ext.args import THRESHOLD_FLAG, Settings, SettingsError
from sglang_spec_ext.compat import sglang_api
from sglang_spec_ext.counts import Counts
from sglang_spec_ext.policy import BatchThresholdPolicy, Mode
from sglang_spec_ext.target_only.draft_kv import DraftKVWriter
from sglang_spec_ext.target_only.graphs import TargetGraphs, largest_threshold
from sglang_spec_ext.target_only.warm_draft import WarmDraft

Forward = Callable[..., Any]


class Step(ABC):
    """Runs decode steps of one speculative worker in the mode that the policy says.

    Args:
        worker: SGLang's worker.
        settings: what the user asked for.
        draft: has the draft's ``draft_runner`` and ``req_to_token_pool``, and whatever
            `sglang_api.draft_contexts` reads.
    """

    def __init__(self, worker: Any, settings: Settings, draft: Any) -> None:
        self.worker = worker
        self.counts = Counts()
        self.policy = BatchThresholdPolicy(settings, self.counts.step)
        self._draft = draft
        if sglang_api.keeps_recurrent_state(draft.req_to_token_pool):
            raise SettingsError(
                f"{THRESHOLD_FLAG} {settings.threshold} does not work with this target: it has "
                "Mamba or linear-attention layers, whose state the target-only step does not "
                f"commit yet. Serve it without {THRESHOLD_FLAG}."
            )
        self._req_to_token: torch.Tensor = draft.req_to_token_pool.req_to_token
        reason = None if self._standalone else DraftKVWriter.why_not(draft.draft_runner)
        if self._standalone:
            reason = "a STANDALONE draft is a whole language model"
        self.own_extend_reason = reason
        self._warm_draft: WarmDraft | None = None
        if reason is None:
            self._warm_draft = WarmDraft(
                DraftKVWriter(draft.draft_runner),
                draft,
                requests=self._req_to_token.shape[0],
                device=self._req_to_token.device,
                waits=not sglang_api.copies_draft_kv(worker),
            )
        self._target_graphs: TargetGraphs | None = None
        self.largest_threshold: int | None = None
        # False from the first target-only step up to the resume
        self._resumed = True

    def _start(self, hidden_mode: Any) -> None:
        """Capture the graphs and say that the step is ready.

        Args:
            hidden_mode: what the target returns of its hidden states.
        """
        target_runner = self.worker.target_worker.model_runner
        if sglang_api.decode_graph_runner(target_runner) is not None:
            self._target_graphs = TargetGraphs(target_runner, hidden_mode)
            if self._warm_draft is not None:
                self._warm_draft.capture()
        self.largest_threshold = largest_threshold()
        observe.log_start(self.worker, self.policy.settings, self.own_extend_reason)

    def attach(self, scheduler: Any) -> None:  # noqa: B027
        """Called once with the scheduler whose worker this is, as soon as it is complete."""

    def _can_resume(self) -> bool:
        """False if one more target-only step has to come before the resume."""
        return True

    @property
    def _standalone(self) -> bool:
        return bool(self.worker.speculative_algorithm.is_standalone())

    def forward(self, original: Forward, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the worker's ``forward_batch_generation(batch, *args, **kwargs)``."""
        if batch.forward_mode.is_idle():
            return original(self.worker, batch, *args, **kwargs)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(original, batch, *args, **kwargs)
        switch = self.policy.step(batch.seq_lens.shape[0])
        if switch is not None:
            observe.log_switch(switch, self.policy.settings)
        if self.policy.mode is Mode.TARGET_ONLY or not self._can_resume():
            self._resumed = False
            return self._decode(batch, *args, **kwargs)
        if not self._resumed:
            self._resume(batch)
            self._resumed = True
        return original(self.worker, batch, *args, **kwargs)

    def _prefill(self, original: Forward, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._warm_draft is not None:
            self._warm_draft.catch_up()  # its prefill may read a prefix that was generated here
        result = original(self.worker, batch, *args, **kwargs)
        if not self._resumed and self._warm_draft is not None:
            # this request's first decode may be the resume
            ends = accumulate(sglang_api.prefill_lengths(batch))
            # a copy that blocks would wait for the whole prefill, and the next one with it
            last = torch.tensor([end - 1 for end in ends]).to(
                self._req_to_token.device, non_blocking=True
            )
            self._warm_draft.prefilled(
                batch.req_pool_indices, result.logits_output.hidden_states[last]
            )
        return result

    def _reserved_slots(self, batch: Any, positions: torch.Tensor) -> torch.Tensor:
        """KV slots that the requests hold already, as int64 in the shape of ``positions``.

        Args:
            positions: [batch] or [batch, any] int64.
        """
        requests = batch.req_pool_indices
        rows = requests if positions.ndim == 1 else requests[:, None]
        return self._req_to_token[rows, positions].to(torch.int64)

    @abstractmethod
    def _decode(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One token per request from the target, and the draft's K and V for it."""

    @abstractmethod
    def _resume(self, batch: Any) -> None:
        """Give the next draft its first proposals: draft extend of each last committed token.

        It writes the KV slot that is already there with the same values, and yields top-k and
        hidden state, as after a verify that accepted no draft token.
        """
