"""CUDA graphs of a server with a threshold: which of SGLang's are left out, and the plain decode.

The target's plain decode gets its own set of graphs on its own attention backend object, because a
second runner on the same backend overwrites the buffers of the first.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang_spec_ext.args import Settings
from sglang_spec_ext.compat import sglang_api
from sglang_spec_ext.observe import log_on_first_rank

_announced: set[str] = set()
_largest_captured: int | None = None


def sizes_that_speculate(sizes: list[int], threshold: int) -> list[int]:
    """The captured batch sizes that a batch of at most ``threshold`` requests can be padded to.

    Args:
        sizes: ascending, not empty.
    """
    return sizes[: bisect_left(sizes, threshold) + 1]


def prune_sizes(
    original: Any, settings: Settings, model_runner: Any, *args: Any, **kwargs: Any
) -> tuple[list[int], list[int]]:
    """Around SGLang's ``get_batch_sizes_to_capture``: leave out what is never or hardly used.

    Verify and draft never run above N. The plain decode, which is asked for last, needs no more
    sizes than on a server that never speculates.
    """
    capture, compiled = original(model_runner, *args, **kwargs)
    if model_runner.spec_algorithm.is_none():
        kept = sglang_api.plain_graph_sizes(model_runner.server_args, capture)
        return kept, [size for size in compiled if size in kept]
    global _largest_captured
    kept = sizes_that_speculate(capture, settings.threshold)
    kind = "draft" if model_runner.is_draft_worker else "verify"
    if len(kept) < len(capture):
        _largest_captured = kept[-1]
    if len(kept) < len(capture) and kind not in _announced:
        _announced.add(kind)  # SGLang asks several times, once per buffer that it sizes
        log_on_first_rank(
            f"spec-ext graphs: {kind} for {len(kept)} of {len(capture)} batch sizes, up to "
            f"{kept[-1]}, since none above N={settings.threshold} can speculate"
        )
    return kept, [size for size in compiled if size in kept]


def largest_threshold() -> int | None:
    """The highest N for which all graphs are there; None where none were left out for N."""
    return _largest_captured


class TargetGraphs:
    """The target's plain decode graphs and the attention backend that they were captured on.

    Args:
        target_runner: SGLang's ModelRunner of the target, its verify graphs captured.
        hidden_mode: what the graphs return of the hidden states.
    """

    def __init__(self, target_runner: Any, hidden_mode: Any) -> None:
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        self._target_runner = target_runner
        # SGLang collects all garbage before a capture and after it, each time by a look at all
        # objects of the process; the captures that have just ended left none to find before
        gc.freeze()
        try:
            self._backend, self._runner = sglang_api.capture_plain_decode(
                target_runner, hidden_mode
            )
        finally:
            gc.unfreeze()
        self.sizes: list[int] = list(self._runner.capture_bs)
        log_on_first_rank(
            f"spec-ext graphs: plain decode for {len(self.sizes)} batch sizes, up to "
            f"{self.sizes[-1]}, {time.perf_counter() - started:.1f} s, "
            f"{(free - torch.cuda.mem_get_info()[0]) / 2**30:.2f} GB"
        )

    def in_place(self) -> AbstractContextManager[None]:
        """Let the target's forwards run on these graphs instead of the verify graphs."""
        return sglang_api.decoding_on(self._target_runner, self._backend, self._runner)
