"""Keep a target capturing the layers that its draft was trained on.

SGLang up to 0.5.10.post1 asks the target for its default layers while it captures CUDA graphs, and
tells it the draft's own only after that. So verify replays graphs of the default layers while
prefill runs with the draft's, and a piecewise graph leaves the defaults behind for both. Nothing
fails; drafts are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def init_device_graphs(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.init_device_graphs``, the first that asks.

    From then on the target takes a request for its default layers as one for the draft's. Does
    nothing for a draft that does not name any, nor where nobody asks for defaults.
    """
    layers = getattr(runner, "eagle_aux_hidden_state_layer_ids", None)
    if getattr(runner, "eagle_use_aux_hidden_state", False) and layers is not None:
        _pin(runner.model, layers)
    return original(runner, *args, **kwargs)


def _pin(model: Any, layers: Sequence[int]) -> None:
    capture = model.set_eagle3_layers_to_capture

    def capture_the_drafts(layer_ids: Sequence[int] | None = None) -> Any:
        return capture(layers if layer_ids is None else layer_ids)

    model.set_eagle3_layers_to_capture = capture_the_drafts
