"""Let a draft's decode steps follow its prefill without a gap. Imports no torch.

Row p of a draft's prefill or draft extend holds token p + 1 at position p, so the first decode step
after L rows belongs at position L. Older workers advance the positions before each step and so
start at L + 1. Nothing fails; from the second drafted token on, more are rejected.

Bound around spec-v1 up to SGLang 0.5.11. Both workers have it right since 0.5.12.post1; the spec-v2
worker of 0.5.11 is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def draft_forward(
    original: Callable[..., Any], worker: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around the loop over a draft's decode steps: starts it one position earlier.

    In place, so that a CUDA graph of the loop does the same. A draft of a single token has no step.
    """
    if worker.speculative_num_steps > 1:
        forward_batch.positions.sub_(1)
    return original(worker, forward_batch, *args, **kwargs)
