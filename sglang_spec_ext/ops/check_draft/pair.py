"""A draft beside its target and server, and what several rules want to know about them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from sglang_spec_ext.compat.releases import RELEASES, span
from sglang_spec_ext.ops.check_draft.checkpoint import Checkpoint
from sglang_spec_ext.ops.check_draft.config import DraftConfig, ModelConfig
from sglang_spec_ext.ops.check_draft.edits import Edit
from sglang_spec_ext.ops.check_draft.finding import FixBy, Severity
from sglang_spec_ext.ops.check_draft.loaders import (
    GENERALISED,
    LLAMA_EAGLE3,
    DraftClass,
    Family,
    Load,
    class_of_tensors,
    draft_class,
    simulate,
)
from sglang_spec_ext.ops.check_draft.server import ServerOptions
from sglang_spec_ext.ops.check_draft.tensors import Tensor


class Pair:
    """The subject of all rules."""

    def __init__(
        self, draft: Checkpoint, target: ModelConfig | None, server: ServerOptions
    ) -> None:
        self.draft = draft
        self.known_target = target
        self.server = server
        self.config = DraftConfig(draft.config, draft.path)

    @property
    def target(self) -> ModelConfig:
        """The target, for the rules that are only run when it is known."""
        assert self.known_target is not None
        return self.known_target

    @cached_property
    def named_class(self) -> DraftClass | None:
        """The draft class that config.json names."""
        names = self.config.architectures
        return draft_class(names[0]) if names else None

    @cached_property
    def fitting_class(self) -> DraftClass | None:
        """The draft class that the tensors were made for, as far as they tell."""
        return class_of_tensors(set(self.draft.tensors), self.config)

    @cached_property
    def conflict(self) -> bool:
        """Whether config.json names another kind of draft than the tensors are."""
        named, fitting = self.named_class, self.fitting_class
        if named is None or fitting is None:
            return False
        if named.family is not fitting.family:
            return True
        return fitting.family is Family.EAGLE3 and named.name != fitting.name

    @cached_property
    def draft_class(self) -> DraftClass | None:
        """The class to judge by: the named one unless the tensors contradict it."""
        return self.fitting_class if self.conflict else self.named_class or self.fitting_class

    @property
    def is_eagle3(self) -> bool:
        return self.draft_class is not None and self.draft_class.family is Family.EAGLE3

    @property
    def is_llama_eagle3(self) -> bool:
        return self.draft_class is not None and self.draft_class.name == LLAMA_EAGLE3

    @property
    def is_eagle(self) -> bool:
        return self.draft_class is not None and self.draft_class.family is Family.EAGLE

    @cached_property
    def layers_on_disk(self) -> int:
        """Decoder layers that the tensors are of."""
        numbers = {int(n) for name in self.draft.tensors for n in _LAYER.findall(name)}
        if any("midlayer." in name for name in self.draft.tensors):
            numbers.add(0)
        return max(numbers, default=-1) + 1

    @cached_property
    def settled_config(self) -> DraftConfig:
        """The config with what other rules object to put right, so that one cause shows once."""
        values = dict(self.config.values)
        if self.layers_on_disk:
            values["num_hidden_layers"] = self.layers_on_disk
        if "draft_vocab_size" not in values:
            values["draft_vocab_size"] = self.head_rows
        return DraftConfig(values, self.draft.path)

    @cached_property
    def layers0_names(self) -> dict[str, str]:
        """Tensors of the decoder layer under `layers.0.`, and what they would be as `midlayer.`."""
        return {
            name: to_midlayer(name)
            for name in self.draft.tensors
            if self.is_llama_eagle3 and to_midlayer(name) != name
        }

    @cached_property
    def loads(self) -> list[Load]:
        """What each release loads; empty for a class whose loader is not known here."""
        if self.draft_class is None or self.draft_class.build is None:
            return []
        releases = span(self.draft_class.since)
        if self.is_llama_eagle3 and self.layers_on_disk > 1:  # the others refuse to start
            releases = span(GENERALISED)
        return simulate(
            self.draft_class,
            self.settled_config,
            self.draft.tensors,
            self.layers0_names,
            releases,
        )

    def tensor(self, name: str) -> Tensor | None:
        """A tensor by the name SGLang takes it under, with or without `model.` before it."""
        return self.draft.tensors.get(name) or self.draft.tensors.get(f"model.{name}")

    @property
    def head(self) -> Tensor | None:
        return self.draft.tensors.get("lm_head.weight")

    @property
    def head_rows(self) -> int | None:
        return self.head.shape[0] if self.head and self.head.shape else None

    @cached_property
    def d2t(self) -> Tensor | None:
        """The map from draft ids to target ids; SGLang takes any tensor with `d2t` in its name."""
        return next((t for name, t in self.draft.tensors.items() if "d2t" in name), None)

    @cached_property
    def t2d(self) -> Tensor | None:
        """The mask over the target's vocabulary; SGLang ignores it."""
        return next((t for name, t in self.draft.tensors.items() if "t2d" in name), None)

    @property
    def draft_vocab_size(self) -> int | None:
        return self.settled_config.draft_vocab_size

    @property
    def vocab_size(self) -> int:
        """Ids that a drafted token may have: the target's, or what the draft says they are."""
        if self.known_target is not None:
            return self.known_target.vocab_size
        return self.config.vocab_size


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LAYER0 = re.compile(r"^(model\.)?layers\.0\.")


def to_midlayer(name: str) -> str:
    return _LAYER0.sub(r"\1midlayer.", name)


@dataclass(frozen=True)
class Hit:
    """A rule's objection; the rule itself adds its id and severity."""

    message: str
    fix: str = ""
    fix_by: FixBy = FixBy.NOBODY
    releases: tuple[str, ...] = RELEASES
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One check. ``test`` yields nothing when all is well."""

    id: str
    severity: Severity
    test: Callable[[Pair], Iterator[Hit]]
    needs_target: bool = False


class RuleBook(list[Rule]):
    """The rules of one module in the order of its functions."""

    def rule(
        self, id: str, severity: Severity, *, needs_target: bool = False
    ) -> Callable[[Callable[[Pair], Iterator[Hit]]], Callable[[Pair], Iterator[Hit]]]:
        def add(test: Callable[[Pair], Iterator[Hit]]) -> Callable[[Pair], Iterator[Hit]]:
            self.append(Rule(id, severity, test, needs_target))
            return test

        return add


def listed(names: list[str], most: int = 4) -> str:
    """``a, b, c, d and 7 more``."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
