"""Headers of safetensors files: read with every doubt cleared, and written."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_spec_ext.ops.check_draft.tensors import BITS, CheckpointError, FileRange, Tensor

# The safetensors library refuses longer headers too.
MAX_HEADER = 100_000_000

_LFS_POINTER = b"version https://git-lfs"


def read_json(text: str | bytes, where: Path | str) -> Any:
    """Parse JSON in which no object names a key twice. Raises CheckpointError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{where}: {twice!r} appears twice; keep the one that is meant")
        return seen

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: no valid JSON ({error}); download it again") from error


def read_header(path: Path, name: str | None = None) -> tuple[dict[str, str], list[Tensor]]:
    """The metadata and the tensors of a safetensors file, in the order of its header.

    ``name`` is what the file is called in its checkpoint, where ``path`` is a blob elsewhere. Only
    the header is read. Raises CheckpointError when the file is no safetensors file, is truncated,
    or describes ranges that overlap, leave gaps or do not fit shape and type.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if (prefix + file.read(len(_LFS_POINTER) - 8)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: this is a Git LFS pointer, not the weights; run `git lfs pull` there"
            )
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: {size} bytes are no safetensors file; download again")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{path}: its header claims {length} bytes, the file has {size}: not a "
                "safetensors file, or truncated; download it again"
            )
        file.seek(8)
        raw = file.read(length)
    header = read_json(raw, f"{path} (header)")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no JSON object; download it again")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map text to text; rewrite the file")
    data_start = 8 + length
    file_name = name or path.name
    tensors = [
        _tensor(path, file_name, data_start, tensor, entry) for tensor, entry in header.items()
    ]
    _check_coverage(path, tensors, data_start, size)
    return metadata, tensors


def header_bytes(metadata: Mapping[str, str], tensors: Iterable[Tensor]) -> bytes:
    """Length prefix and header for ``tensors`` laid out one after the other in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape or ()),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    return struct.pack("<Q", len(text)) + text


def _tensor(path: Path, file: str, data_start: int, name: str, entry: Any) -> Tensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sane = all(type(n) is int and n >= 0 for n in [*shape, start, end]) and start <= end
    except (TypeError, KeyError, ValueError):
        sane = False
    if not sane or not isinstance(dtype, str):
        raise CheckpointError(f"{path}: the header entry of {name!r} is malformed; download again")
    tensor = Tensor(
        name, file, dtype, tuple(shape), FileRange(path, data_start + start, end - start)
    )
    if dtype in BITS and tensor.nbytes != end - start:
        raise CheckpointError(
            f"{path}: {name!r} is {dtype} {list(shape)}, which is {tensor.nbytes} bytes, but the "
            f"header gives it {end - start}; download the file again"
        )
    return tensor


def _check_coverage(path: Path, tensors: list[Tensor], data_start: int, size: int) -> None:
    position = data_start
    ranges = [t.source for t in tensors if isinstance(t.source, FileRange)]
    for part in sorted(ranges, key=lambda r: (r.offset, r.length)):
        if part.offset != position:
            raise CheckpointError(f"{path}: tensors overlap or leave gaps; download the file again")
        position += part.length
    if position != size:
        raise CheckpointError(
            f"{path}: the header describes {position} bytes, the file has {size}: truncated or "
            "still being written; download it again"
        )
