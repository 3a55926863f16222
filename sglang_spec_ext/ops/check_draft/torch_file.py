"""Tensor metadata of a ``pytorch_model.bin`` without torch and without running its pickle."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_spec_ext.ops.check_draft.tensors import BITS, CHUNK, CheckpointError, Tensor

MAX_PICKLE = 64 << 20  # a state dict's pickle holds names and shapes only

TO_SAFETENSORS = (
    'python -c "import torch; from safetensors.torch import save_file; '
    "save_file({{k: v.contiguous() for k, v in torch.load('{name}', map_location='cpu', "
    "weights_only=True).items()}}, 'model.safetensors')\""
)

_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


class _Storage(NamedTuple):
    dtype: str
    key: str
    numel: int


class _View(NamedTuple):
    """What the pickle says about a tensor: its storage and the part of it that is used."""

    storage: _Storage
    offset: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class ZipRange:
    """``length`` bytes of the member ``member`` of a zip file from ``offset``."""

    path: Path
    member: str
    offset: int
    length: int

    def chunks(self) -> Iterator[bytes]:
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
            file.seek(self.offset)
            left = self.length
            while left:
                chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise CheckpointError(f"{self.path}: {self.member} ends inside a tensor")
                left -= len(chunk)
                yield chunk


def read_tensors(path: Path, file: str) -> list[Tensor]:
    """The tensors of a state dict that ``torch.save`` wrote (the zip format, torch 1.6 or later).

    ``file`` is what the file is called in its checkpoint, where ``path`` is a blob elsewhere.
    Raises CheckpointError when the file is anything else; the message then names the command
    that makes a safetensors file out of it.
    """
    convert = f"make it a safetensors file: {TO_SAFETENSORS.format(name=file)}"
    try:
        root, members, state = _open(path)
    except Exception as error:  # a hostile or cut-off pickle can raise anything
        raise CheckpointError(f"{path}: not readable without torch ({error}); {convert}") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(view, _View) for name, view in state.items()
    ):
        raise CheckpointError(f"{path}: holds more than a flat state dict of tensors; {convert}")
    return [_tensor(path, file, root, members, name, view, convert) for name, view in state.items()]


def _open(path: Path) -> tuple[str, dict[str, int], Any]:
    """The folder inside the zip, the sizes of its members, and what its pickle holds."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info.file_size for info in archive.infolist()}
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(pickles) != 1 or members[pickles[0]] > MAX_PICKLE:
            raise CheckpointError("no state dict that torch.save wrote")
        root = pickles[0].removesuffix("data.pkl")
        if members.get(root + "byteorder") and archive.read(root + "byteorder") != b"little":
            raise CheckpointError("its numbers are big-endian")
        with archive.open(pickles[0]) as file:
            return root, members, _StateDictReader(file).load()


def _tensor(
    path: Path,
    file: str,
    root: str,
    members: dict[str, int],
    name: str,
    view: _View,
    convert: str,
) -> Tensor:
    dtype, key, numel = view.storage
    item = BITS[dtype] // 8
    member = f"{root}data/{key}"
    tensor = Tensor(name, file, dtype, view.shape, None)
    fits = (view.offset + tensor.numel) * item <= members.get(member, -1) >= numel * item
    if not view.contiguous or not fits:
        raise CheckpointError(f"{path}: {name!r} is a view or cut off; {convert}")
    source = ZipRange(path, member, view.offset * item, tensor.nbytes)
    return Tensor(name, file, dtype, view.shape, source)


class _StateDictReader(pickle.Unpickler):
    """Unpickles into plain tuples; any global that a state dict does not need is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _rebuild_parameter
        if module == "torch" and name in _STORAGES:
            return name
        raise CheckpointError(f"its pickle asks for {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _device, numel = pid
        if kind != "storage" or storage not in _STORAGES:
            raise CheckpointError(f"its pickle refers to {kind!r}, which is no tensor")
        return _Storage(_STORAGES[storage], str(key), int(numel))


def _rebuild_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> _View:
    sane = all(type(n) is int and n >= 0 for n in (offset, *shape, *stride))
    if not isinstance(storage, _Storage) or not sane or len(shape) != len(stride):
        raise CheckpointError("its pickle describes a tensor with an impossible shape")
    return _View(storage, offset, tuple(shape), tuple(stride))


def _rebuild_parameter(view: _View, *_: Any) -> _View:
    return view
