"""Give the class of a loaded target the EAGLE-3 hooks that it lacks. Imports no torch.

What is set is what SGLang's own classes do in these methods: the setters write which layers to
capture, counted by their inputs, and ``get_embed_and_head`` gives the two weights that a draft may
share. Every method is set on the class of the target at hand, and only where it is missing or, for
``get_embed_and_head``, where it raises AttributeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from sglang_spec_ext.compat.eagle3_models import How, Row, row_of

CAPTURE = "set_eagle3_layers_to_capture"
CAPTURE_DFLASH = "set_dflash_layers_to_capture"
CAPTURE_DSPARK = "set_dspark_layers_to_capture"
GET_WEIGHTS = "get_embed_and_head"
SET_WEIGHTS = "set_embed_and_head"

_STEPS_INWARDS = ("model", "language_model", "llm", "thinker")
_UNPACKED = "_spec_ext_unpacks"
_HANDS_OVER = "_spec_ext_hands_embeddings_over"

Setter = Callable[..., Any]


class MissingHooksError(RuntimeError):
    """The target's class cannot capture the hidden states that the draft needs."""


def refusal(model_class: type, version: str | None, algorithm: str) -> str | None:
    """Why a class can have no hooks, judged before its weights load; None if it has or gets them.

    Args:
        algorithm: of the server, for the message.
    """
    name = model_class.__name__
    if hasattr(model_class, needed_by(algorithm)) or row_of(name, version) is not None:
        return None
    if any("__getattr__" in vars(c) and c.__module__[:5] != "torch" for c in model_class.__mro__):
        return None  # it may ask another object, which only the loaded model has
    why = "its layers do not collect them"
    if hasattr(model_class, CAPTURE_DSPARK):
        why = "its layers collect them for DSPARK only"
    return explain(name, version, algorithm, why)


def needed_by(algorithm: str) -> str:
    """The setter that SGLang calls for an algorithm."""
    return CAPTURE if algorithm == "EAGLE3" else CAPTURE_DFLASH


def explain(name: str, version: str | None, algorithm: str, why: str) -> str:
    """One message: what is needed, what is in the way, what to do."""
    return (
        f"--speculative-algorithm {algorithm} needs the hidden states of some of the target's "
        f"layers, and {name} in SGLang {version or 'of this environment'} cannot give them: {why}, "
        "so its forward would have to be rewritten, which a plugin does not do. Serve this target "
        "without speculation or with --speculative-algorithm STANDALONE, which needs no hidden "
        "states. Which classes can: docs/eagle3-hooks.md"
    )


def install(model: Any, version: str | None, algorithm: str = "EAGLE3") -> list[str]:
    """Set the missing hooks on the class of a loaded target.

    Args:
        model: the target, weights loaded.
        version: of the installed SGLang, which decides the row of the table.
        algorithm: EAGLE3, DFLASH or another of the family that captures hidden states.

    Returns:
        The names of the methods that were set; empty when the class lacks none.

    Raises:
        MissingHooksError: what the algorithm calls is missing and cannot be had.
    """
    problem = obstacle(model, version, algorithm)
    if problem is not None:
        raise MissingHooksError(problem)
    return _Installation(model, version).run()


def obstacle(model: Any, version: str | None, algorithm: str) -> str | None:
    """Why a model that is built can have no hooks; None if it has or gets them.

    Some classes wrap what the checkpoint says, so this is the first that can tell for them.
    """
    needed = needed_by(algorithm)
    name = type(model).__name__
    holder = model
    while not hasattr(holder, needed):
        row = row_of(type(holder).__name__, version)
        if row is None:
            why = f"it has no {needed}"
            if holder is not model:
                why = f"the {type(holder).__name__} that it wraps has no {needed}"
            return explain(name, version, algorithm, why)
        if row.how is not How.DELEGATE:
            return None
        holder = follow(holder, row.inner)
    return None


def install_weights(model: Any, version: str | None) -> list[str]:
    """The same for a draft that captures nothing and borrows embedding or head all the same."""
    installation = _Installation(model, version)
    installation.lend_weights()
    return installation.made


def follow(model: Any, path: str) -> Any:
    """The object at an attribute path such as ``llm.model``; the model itself for an empty one."""
    return functools.reduce(getattr, path.split("."), model) if path else model


class _Installation:
    def __init__(self, model: Any, version: str | None) -> None:
        self.model = model
        self.version = version
        self.row = row_of(type(model).__name__, version)
        self.made: list[str] = []

    def run(self) -> list[str]:
        row = self.row
        if row is None:
            self.lend_weights()
            return self.made
        if row.how is How.DELEGATE:
            # what it wraps may be in the table itself
            inner = follow(self.model, row.inner)
            self.made += [
                f"{row.inner}.{name}" for name in _Installation(inner, self.version).run()
            ]
            for name in (CAPTURE, CAPTURE_DFLASH, SET_WEIGHTS):
                if hasattr(inner, name):
                    self._set(name, _delegate(row.inner, name))
            if row.own_forward and _HANDS_OVER not in type(self.model).__dict__:
                _adapt_forward(self.model, row)
        elif row.how is How.DFLASH:
            self._set(CAPTURE, _through_dflash(_layers_of(self.model)))
        else:
            self._set(CAPTURE, _setter(row, _layers_of(follow(self.model, row.inner))))
            self._set(CAPTURE_DFLASH, _dflash_setter())
        self.lend_weights()
        return self.made

    def _set(self, name: str, method: Setter) -> None:
        if not hasattr(self.model, name):
            method.__name__ = name
            setattr(type(self.model), name, method)
            self.made.append(name)

    def lend_weights(self) -> None:
        try:
            self.model.get_embed_and_head()
            works = True
        except AttributeError:
            works = False
        if not works:
            # a method that looks in the wrong place is as good as none
            method = _get_weights if self.row is None else _weights_of(self.row)
            if _can(method, self.model):
                setattr(type(self.model), GET_WEIGHTS, method)
                self.made.append(GET_WEIGHTS)
        if hasattr(self.model, GET_WEIGHTS):
            self._set(SET_WEIGHTS, _set_weights_of(self.row))


# ------------------------------------------------------------------------ capture


def _delegate(path: str, name: str) -> Setter:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(follow(self, path), name)(*args, **kwargs)

    return method


def _setter(row: Row, layers: int) -> Setter:
    def set_layers(self: Any, layer_ids: Sequence[int] | None = None) -> None:
        group = getattr(self, "pp_group", None)
        if group is not None and not group.is_last_rank:
            return
        inner = follow(self, row.inner)
        wanted = inputs_of(layer_ids, layers)
        current = inner.layers_to_capture
        inner.layers_to_capture = type(current)(wanted) if current is not None else wanted
        if row.how is How.UNPACK:
            _unpack_before(self.logits_processor)
        else:
            self.capture_aux_hidden_states = True

    return set_layers


def inputs_of(layer_ids: Sequence[int] | None, layers: int) -> list[int]:
    """Layers whose inputs are captured, for layers whose outputs a draft asks for.

    None stands for SGLang's default of three, which it counts by inputs.
    """
    if layer_ids is None:
        return [2, layers // 2, layers - 3]
    return [layer + 1 for layer in layer_ids]


def _through_dflash(layers: int) -> Setter:
    def set_layers(self: Any, layer_ids: Sequence[int] | None = None) -> None:
        outputs = [place - 1 for place in inputs_of(layer_ids, layers)]
        self.set_dflash_layers_to_capture(outputs)

    return set_layers


def _dflash_setter() -> Setter:
    def set_layers(self: Any, layer_ids: Sequence[int]) -> None:
        if layer_ids is None:
            raise ValueError("DFLASH requires explicit layer_ids for aux hidden capture.")
        self.set_eagle3_layers_to_capture(layer_ids)

    return set_layers


def _layers_of(model: Any) -> int:
    """How many layers the language model in ``model`` has."""
    layers = next((one.layers for one in _inwards(model) if hasattr(one, "layers")), None)
    if layers is None:
        raise MissingHooksError(f"{type(model).__name__} keeps no list of layers where ours look")
    return len(layers)


def _unpack_before(logits_processor: Any) -> None:
    """Let a logits processor take (hidden state, captured states) for the hidden state."""
    if getattr(logits_processor, _UNPACKED, False):
        return

    def unpack(
        _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if len(args) < 2 or not isinstance(args[1], tuple):
            return None
        hidden, states = args[1]
        return (args[0], hidden, *args[2:]), {**kwargs, "aux_hidden_states": states}

    # before whoever looks at the states, as the check of their capture does
    logits_processor.register_forward_pre_hook(unpack, with_kwargs=True, prepend=True)
    setattr(logits_processor, _UNPACKED, True)


# ------------------------------------------------------------------------ shared weights


def _weights_of(row: Row) -> Setter:
    def get_embed_and_head(self: Any) -> tuple[Any, Any]:
        holder = _holder(self, row)
        if holder is not self and hasattr(holder, GET_WEIGHTS):
            found: tuple[Any, Any] = holder.get_embed_and_head()
            return found
        return _get_weights(holder)

    return get_embed_and_head


def _set_weights_of(row: Row | None) -> Setter:
    def set_embed_and_head(self: Any, embed: Any, head: Any) -> None:
        modules = _modules_of(self if row is None else _holder(self, row))
        for module, weight in zip(modules, (embed, head), strict=True):
            if hasattr(module, "weight"):
                del module.weight
            module.weight = weight

    return set_embed_and_head


def _holder(model: Any, row: Row) -> Any:
    """The model that keeps embedding and head: what a wrapper wraps, else the class itself."""
    return follow(model, row.inner) if row.how is How.DELEGATE else model


def _get_weights(self: Any) -> tuple[Any, Any]:
    embed, head = _modules_of(self)
    return embed.weight, head.weight


def _modules_of(model: Any) -> tuple[Any, Any]:
    """Input embedding and output head; the same module where they are tied.

    Raises:
        AttributeError: one of them is not where SGLang's models keep it.
    """
    owners = _inwards(model)
    embed = next((one.embed_tokens for one in owners if hasattr(one, "embed_tokens")), None)
    head = next((one.lm_head for one in owners if hasattr(one, "lm_head")), None)
    if head is None and getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        head = embed
    if embed is None or head is None:
        raise AttributeError(f"{type(model).__name__} keeps no embed_tokens or lm_head")
    return embed, head


def _inwards(model: Any) -> list[Any]:
    """The model and what it wraps, from the outside to the layers."""
    found = [model]
    while True:
        steps = (getattr(found[-1], name, None) for name in _STEPS_INWARDS)
        inner = next((one for one in steps if one is not None), None)
        if inner is None or any(inner is one for one in found):
            return found
        found.append(inner)


def _can(method: Setter, model: Any) -> bool:
    try:
        method(model)
    except AttributeError:
        return False
    return True


# ------------------------------------------------------------------------ own forward


def _adapt_forward(model: Any, row: Row) -> None:
    """Send verify to the inner model; hand the prefill's embeddings to the draft.

    Drafted tokens are text, so the inner model alone can verify them; and a draft must embed an
    image's places by what the target embedded there, their ids lying outside the vocabulary.
    """
    cls = type(model)
    original = cls.forward

    @functools.wraps(original)
    def forward(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            return follow(self, row.inner)(input_ids, positions, forward_batch)
        return original(self, input_ids, positions, forward_batch, *rest, **kwargs)

    def keep_embeddings(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward_batch, embeds = args[2], kwargs.get("input_embeds")
        if embeds is not None and forward_batch.contains_mm_inputs():
            # a copy: on a GPU the norms add every layer's output to what they are given
            forward_batch.mm_input_embeds = embeds.clone()

    cls.forward = forward
    setattr(cls, _HANDS_OVER, True)
    follow(model, row.inner).register_forward_pre_hook(keep_embeddings, with_kwargs=True)
