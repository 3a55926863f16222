"""config.json in the words of this check: what SGLang and transformers make of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_spec_ext.ops.check_draft.tensors import CheckpointError

NESTED = "transformer_layer_config"  # speculators keep the draft's shape in here
AUX_IDS = "eagle_aux_hidden_state_layer_ids"

_TEXT_CONFIGS = ("thinker_config", "llm_config", "language_config", "text_config")
_CONTEXT_KEYS = (  # SGLang takes the first that is there
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
_DTYPES = {"half": "float16", "float": "float32"}


class ModelConfig:
    """A model's config.json; of a multimodal model, that of its language model.

    The properties raise CheckpointError when a key holds something impossible.
    """

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path
        self.values = text_config(raw)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise CheckpointError(
                f"{self.path}/config.json: {key} must be a positive whole number, is {value!r}"
            )
        return value

    @property
    def architectures(self) -> tuple[str, ...]:
        names = self.raw.get("architectures") or ()
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise CheckpointError(
                f"{self.path}/config.json: architectures must be a list of class names, "
                f"is {names!r}"
            )
        return tuple(names)

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type") or self.raw.get("model_type") or "")

    @property
    def hidden_size(self) -> int:
        return self.integer("hidden_size")

    @property
    def vocab_size(self) -> int:
        return self.integer("vocab_size")

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers")

    @property
    def num_heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def is_mla(self) -> bool:
        return self.get("kv_lora_rank") is not None

    @property
    def is_sparse_mla(self) -> bool:
        return self.is_mla and self.get("index_topk") is not None

    @property
    def context_length(self) -> int | None:
        """Tokens that SGLang allows for this model; None where config.json states none."""
        scaling = self.rope_scaling
        factor = scaling.get("factor", 1)
        if "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3":
            factor = 1
        for key in _CONTEXT_KEYS:
            if self.get(key) is not None:
                try:
                    return int(factor * self.get(key))
                except (TypeError, ValueError):
                    raise CheckpointError(
                        f"{self.path}/config.json: {key} or the rope factor is no number"
                    ) from None
        return None

    @property
    def rope_theta(self) -> float | None:
        """The RoPE base; None where config.json states none."""
        theta = self._rope_parameters.get("rope_theta", self.get("rope_theta"))
        return float(theta) if isinstance(theta, (int, float)) else None

    @property
    def rope_scaling(self) -> dict[str, Any]:
        """The RoPE scaling without its base; empty when there is none."""
        scaling = dict(self._rope_parameters or self.get("rope_scaling") or {})
        scaling.pop("rope_theta", None)
        kind = scaling.pop("type", None)
        scaling.setdefault("rope_type", kind or "default")
        if scaling["rope_type"] == "default" and "mrope_section" not in scaling:
            return {}
        return scaling

    @property
    def dtype(self) -> str | None:
        """The type SGLang runs the model in under ``--dtype auto``."""
        stated = None
        for config in (self.values, self.raw):
            stated = stated or config.get("dtype") or config.get("torch_dtype")
        name = str(stated or "float32").removeprefix("torch.")
        name = _DTYPES.get(name, name)
        if name != "float32":
            return name
        return "bfloat16" if self.model_type.startswith("gemma") else "float16"

    @property
    def quantization(self) -> str | None:
        """The quantisation method that config.json names."""
        config = self.get("quantization_config") or self.raw.get("quantization_config")
        if not config:
            return None
        return str(config.get("quant_method", "unnamed")) if isinstance(config, dict) else "unnamed"

    @property
    def _rope_parameters(self) -> dict[str, Any]:
        parameters = self.get("rope_parameters")
        return parameters if isinstance(parameters, dict) else {}


class DraftConfig(ModelConfig):
    """A draft's config.json; a nested one is read as what it would be when flattened."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        super().__init__(raw, path)
        self.nested = isinstance(raw.get(NESTED), dict)
        if self.nested:
            self.values = flatten(raw)

    @cached_property
    def eagle_config(self) -> Mapping[str, Any]:
        value = self.get("eagle_config") or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path}/config.json: eagle_config must be an object")
        return value

    @property
    def num_key_value_heads(self) -> int:
        return self.integer("num_key_value_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.integer("head_dim", self.hidden_size // self.num_heads)

    @property
    def intermediate_size(self) -> int:
        llama4 = self.model_type == "llama4_text"
        return self.integer("intermediate_size_mlp" if llama4 else "intermediate_size")

    @property
    def draft_vocab_size(self) -> int | None:
        """Rows of the draft's own lm_head; None when it borrows the target's."""
        return None if self.get("draft_vocab_size") is None else self.integer("draft_vocab_size")

    @property
    def tied(self) -> bool:
        return bool(self.get("tie_word_embeddings", self.model_type.startswith("gemma")))

    @property
    def states_target_hidden_size(self) -> bool:
        return self.get("target_hidden_size") is not None

    @property
    def target_hidden_size(self) -> int:
        """The width of the states that the draft takes from the target."""
        return self.integer("target_hidden_size", self.hidden_size)

    @property
    def borrows_embedding(self) -> bool:
        """Whether SGLang puts the target's embedding in place of the draft's."""
        return self.target_hidden_size == self.hidden_size

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        """The captured layers where SGLang looks for them."""
        return self._ids(self.eagle_config.get(AUX_IDS), f"eagle_config.{AUX_IDS}")

    @property
    def foreign_aux_layer_ids(self) -> tuple[int, ...] | None:
        """The captured layers where vLLM looks for them (and counts them from one further on)."""
        return self._ids(self.get(AUX_IDS), AUX_IDS)

    @property
    def num_aux_states(self) -> int:
        """How many captured states SGLang's loader makes ``fc`` for."""
        if self.get("num_aux_hidden_states") is not None:
            return self.integer("num_aux_hidden_states")
        return len(self.aux_layer_ids or ()) or 3

    @property
    def uses_aux_states(self) -> bool:
        return bool(self.eagle_config.get("use_aux_hidden_state", True))

    @property
    def has_fc_norm(self) -> bool:
        return bool(self.get("fc_norm") or self.get("use_aux_norm"))

    @property
    def has_input_norm(self) -> bool:
        return bool(self.eagle_config.get("norm_before_fc", self.get("norm_before_fc", False)))

    @property
    def attention_bias(self) -> bool:
        return bool(self.get("attention_bias") or self.get("bias"))

    def _ids(self, value: Any, key: str) -> tuple[int, ...] | None:
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(type(n) is int for n in value):
            raise CheckpointError(
                f"{self.path}/config.json: {key} must be a list of layer numbers, is {value!r}"
            )
        return tuple(value)


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config, the whole of it for a text model."""
    for key in _TEXT_CONFIGS:
        inner = raw.get(key)
        if isinstance(inner, dict):
            return text_config(inner)
    return raw


# What only speculators read; their own description of how the draft was made and is to be used.
_SPECULATORS_ONLY = (
    NESTED,
    "auto_map",
    "has_no_defaults_at_init",
    "model_type",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
)


def flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators config as the flat one that SGLang reads: nested keys first, then the outer."""
    outer = {key: value for key, value in raw.items() if key not in _SPECULATORS_ONLY}
    if outer.get("target_hidden_size", ...) is None:
        del outer["target_hidden_size"]
    flat = {**raw[NESTED], **outer}
    # vLLM takes an absent flag of a nested config for true.
    flat.setdefault("norm_before_residual", True)
    return flat
