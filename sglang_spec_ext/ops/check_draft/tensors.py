"""A tensor that lies in a file: its name, shape and type, and a way to stream its bytes."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CHUNK = 16 << 20  # bytes held in memory while a tensor streams through

# Bits of one element, by the names that safetensors uses.
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

# What a weight that was never quantised is stored as.
PLAIN_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

_INTEGER_CODES = {"I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "B"}


class CheckpointError(Exception):
    """A checkpoint cannot be read. The message names the file and what to do about it."""


class Source(Protocol):
    """Where the bytes of a tensor are."""

    def chunks(self) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class FileRange:
    """``length`` bytes of ``path`` from ``offset``."""

    path: Path
    offset: int
    length: int

    def chunks(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            left = self.length
            while left:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise CheckpointError(f"{self.path}: the file ends inside a tensor")
                left -= len(chunk)
                yield chunk


@dataclass(frozen=True)
class Literal:
    """Bytes that are in no file yet."""

    data: bytes

    def chunks(self) -> Iterator[bytes]:
        yield self.data


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    ``shape`` and ``dtype`` are None when only an index names it and its file is missing.
    ``file`` is the name of the weight file that holds it. ``dtype`` is a safetensors name.
    """

    name: str
    file: str
    dtype: str | None
    shape: tuple[int, ...] | None
    source: Source | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape or ())

    @property
    def nbytes(self) -> int:
        return (self.numel * BITS.get(self.dtype or "", 0) + 7) // 8

    def integers(self) -> list[int]:
        """The values, flattened. Raises CheckpointError when they are no integers or absent."""
        if self.source is None or self.dtype not in _INTEGER_CODES:
            raise CheckpointError(f"{self.file}: {self.name} holds {self.dtype}, no integers")
        values = array(_INTEGER_CODES[self.dtype], b"".join(self.source.chunks()))
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()


def pack_integers(values: list[int], dtype: str) -> bytes:
    """Little-endian bytes of ``values``. Raises OverflowError when one does not fit."""
    packed = array(_INTEGER_CODES[dtype], values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def is_integer(dtype: str | None) -> bool:
    return dtype in _INTEGER_CODES and dtype != "BOOL"
