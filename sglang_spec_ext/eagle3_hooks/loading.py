"""What happens around the load of a target: refusal before, hooks after, the check armed.

`load_model` goes around ``ModelRunner.load_model``, and `initialize_model` around what builds the
model in there, before its weights load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_spec_ext.compat import releases
from sglang_spec_ext.eagle3_hooks import capture, delegation
from sglang_spec_ext.ops.check_draft.checkpoint import located, read_config
from sglang_spec_ext.ops.check_draft.config import DraftConfig
from sglang_spec_ext.ops.check_draft.tensors import CheckpointError

logger = logging.getLogger("sglang_spec_ext")


def load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.load_model``: does nothing for a draft or where no states are captured.

    Raises:
        MissingHooksError: the target cannot capture; before it is built, if its class says so.
        CaptureError: out of the first forward, when the states do not arrive.
    """
    from sglang_spec_ext.compat import sglang_api

    wanted = sglang_api.capture_request(runner)
    if wanted is None:
        return original(runner, *args, **kwargs)
    version = releases.installed_version()
    if wanted.captures:
        target_class = sglang_api.target_class(runner)
        problem = delegation.refusal(target_class, version, wanted.algorithm)
        if problem is not None:
            raise delegation.MissingHooksError(problem)
    result = _loading_for(wanted, lambda: original(runner, *args, **kwargs))
    model = runner.model
    if not wanted.captures:
        _log(model, delegation.install_weights(model, version))
        return result
    _log(model, delegation.install(model, version, wanted.algorithm))
    group = getattr(model, "pp_group", None)
    if group is None or group.is_last_rank:
        name = type(model).__name__
        capture.arm(sglang_api.logits_processors(model), expected(wanted, name))
    return result


_awaited: Any = None
"""The ``sglang_api.CaptureRequest`` of the target that is being loaded."""


def _loading_for(wanted: Any, load: Callable[[], Any]) -> Any:
    global _awaited
    _awaited = wanted
    try:
        return load()
    finally:
        _awaited = None


def initialize_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the function that builds a model: does nothing but for a target that is to capture.

    Raises:
        MissingHooksError: what the target wraps, by its checkpoint, cannot capture.
    """
    model = original(*args, **kwargs)
    if _awaited is not None and _awaited.captures:
        problem = delegation.obstacle(model, releases.installed_version(), _awaited.algorithm)
        if problem is not None:
            raise delegation.MissingHooksError(problem)
    return model


def expected(wanted: Any, target: str) -> capture.Expected:
    """What must arrive for a ``sglang_api.CaptureRequest``.

    The draft's config.json says what its ``fc`` was made for. Where it cannot be read, SGLang's own
    default stands for it: three states as wide as the target's.
    """
    states = len(wanted.layers) if wanted.layers is not None else 3
    width = None
    if wanted.algorithm == "EAGLE3" and wanted.draft:
        try:
            draft = located(Path(wanted.draft))
            config = DraftConfig(read_config(draft), draft)
            states, width = config.num_aux_states, config.target_hidden_size
        except CheckpointError as problem:
            logger.warning("spec-ext: cannot tell what the draft's fc takes: %s", problem)
    return capture.Expected(states, width, wanted.layers, target)


def _log(model: Any, made: list[str]) -> None:
    if made:
        logger.info(
            "spec-ext: %s lacks EAGLE-3 hooks in this SGLang; set on its class: %s",
            type(model).__name__,
            ", ".join(made),
        )
