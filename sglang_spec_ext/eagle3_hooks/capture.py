"""Check that the hidden states that were asked for reach the logits processor. Imports no torch.

A setter that exists and has no effect is the worst case: SGLang then hands the draft the last
hidden state, which has the draft's own width, so that `fc` is skipped, nothing fails, and no
drafted token is ever accepted. The check runs once, in the target's first forward: the capture of
CUDA graphs, SGLang's own warm-up request, or at the latest the first prefill. So it comes before
any token is sent to anyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class CaptureError(RuntimeError):
    """The draft would not get the states that it was trained on."""


@dataclass(frozen=True)
class Expected:
    """What the draft fuses.

    Attributes:
        states: how many captured states.
        width: of each, in elements; None where it is not known.
        layers: the layers that were asked for, by their outputs; None for SGLang's default.
        target: class name of the target, for the message.
    """

    states: int
    width: int | None
    layers: Sequence[int] | None
    target: str


def arm(processors: Sequence[Any], expected: Expected) -> None:
    """Check the first forward that reaches one of a target's logits processors.

    Raises:
        CaptureError: there is none, so nothing could be checked. The hook that this sets raises it
            out of the first forward when the states are not those expected.
    """
    if not processors:
        raise CaptureError(
            f"{expected.target} has no logits processor, so nobody would hand hidden states to the "
            "draft. Serve this target without speculation."
        )
    handles: list[Any] = []

    def check(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[1] if len(args) > 1 else kwargs["hidden_states"]
        states = args[4] if len(args) > 4 else kwargs.get("aux_hidden_states")
        if hidden.shape[0] == 0:
            return  # an idle rank runs no layer
        problem = gap(states, hidden.shape[-1], expected)
        if problem is not None:
            raise CaptureError(problem)
        for handle in handles:
            handle.remove()

    handles += [p.register_forward_pre_hook(check, with_kwargs=True) for p in processors]


def gap(states: Any, hidden_width: int, expected: Expected) -> str | None:
    """What is wrong with the states that arrived, None if nothing.

    Args:
        states: one tensor [tokens, width] per state, the same packed into one tensor, or None.
        hidden_width: of the target's last hidden state.
    """
    width = expected.width or hidden_width
    if states is None:
        arrived = "none"
        fits = False
    elif hasattr(states, "shape"):
        arrived = f"one packed state of width {states.shape[-1]}"
        fits = states.shape[-1] == expected.states * width
    else:
        widths = [state.shape[-1] for state in states]
        arrived = f"{len(widths)} of width {', '.join(map(str, widths))}" if widths else "none"
        fits = widths == [width] * expected.states
    if fits:
        return None
    layers = "its default layers" if expected.layers is None else f"layers {list(expected.layers)}"
    return (
        f"the draft fuses {expected.states} hidden states of width {width}, captured at {layers}; "
        f"what {expected.target} handed to its logits processor is {arrived}. The draft would see "
        "states that it was not trained on, and accept length would stay at 1. Check with "
        "`sglang-spec-ext check-draft` that the draft belongs to this target."
    )
