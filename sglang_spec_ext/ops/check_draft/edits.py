"""What a conversion may change. Each edit turns one checkpoint (still unwritten) into another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sglang_spec_ext.ops.check_draft.checkpoint import Checkpoint
from sglang_spec_ext.ops.check_draft.tensors import BITS, Literal, Tensor, pack_integers


class Edit(Protocol):
    def apply(self, checkpoint: Checkpoint) -> Checkpoint: ...

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class RenameTensors:
    """Rename every tensor whose name ``rename`` changes."""

    rename: Callable[[str], str]
    what: str

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        renamed = {}
        for name, tensor in checkpoint.tensors.items():
            new = self.rename(name)
            if new in renamed:
                raise ValueError(f"{self.what}: both {name} and another tensor become {new}")
            renamed[new] = replace(tensor, name=new)
        return checkpoint.with_tensors(renamed)

    def __str__(self) -> str:
        return f"rename {self.what}"


@dataclass(frozen=True)
class SetConfig:
    """Set keys of config.json, remove others."""

    values: Mapping[str, Any] = field(default_factory=dict)
    remove: tuple[str, ...] = ()

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        config = {k: v for k, v in checkpoint.config.items() if k not in self.remove}
        return checkpoint.with_config({**config, **self.values})

    def __str__(self) -> str:
        parts = [f"{key} = {value!r}" for key, value in self.values.items()]
        return "config.json: " + ", ".join(parts + [f"no {key}" for key in self.remove])


@dataclass(frozen=True)
class ReplaceConfig:
    """Write another config.json."""

    config: Mapping[str, Any]
    what: str

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint.with_config(dict(self.config))

    def __str__(self) -> str:
        return f"config.json: {self.what}"


@dataclass(frozen=True)
class SetIntegers:
    """Give an integer tensor other values, same shape and type."""

    name: str
    values: tuple[int, ...]
    what: str

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        old = checkpoint.tensors[self.name]
        assert old.dtype is not None
        new = replace(old, source=Literal(pack_integers(list(self.values), old.dtype)))
        return checkpoint.with_tensors({**checkpoint.tensors, self.name: new})

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@dataclass(frozen=True)
class AddZeros:
    """Add a tensor of zeros to the file that holds ``beside``."""

    name: str
    beside: str
    shape: tuple[int, ...]

    def apply(self, checkpoint: Checkpoint) -> Checkpoint:
        model = checkpoint.tensors[self.beside]
        new = Tensor(self.name, model.file, model.dtype, self.shape, None)
        assert new.dtype in BITS
        new = replace(new, source=Literal(bytes(new.nbytes)))
        return checkpoint.with_tensors({**checkpoint.tensors, self.name: new})

    def __str__(self) -> str:
        return f"{self.name}: zeros"
