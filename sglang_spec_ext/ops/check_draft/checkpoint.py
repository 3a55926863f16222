"""A checkpoint as SGLang's loader sees it: config.json and the headers of its weight files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_spec_ext.ops.check_draft import safetensors_file, torch_file
from sglang_spec_ext.ops.check_draft.tensors import CheckpointError, Tensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds, without its weights.

    ``tensors`` is by name; ``metadata`` is each weight file's own, in the order of the files.
    The last four fields are what is wrong with the files as a set.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    metadata: dict[str, dict[str, str]]
    index: dict[str, Any] | None = None
    missing_files: tuple[str, ...] = ()  # named by the index, not here
    unlisted_files: tuple[str, ...] = ()  # here, but not in the index: SGLang does not load them
    misplaced: tuple[str, ...] = ()  # tensors that the index names and their file lacks
    duplicated: tuple[str, ...] = ()  # tensors that are in more than one file

    def with_config(self, config: dict[str, Any]) -> Checkpoint:
        return replace(self, config=config)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Checkpoint:
        return replace(self, tensors=tensors)

    @property
    def from_torch(self) -> bool:
        """Whether the weights are ``*.bin`` files."""
        return any(name.endswith(".bin") for name in self.metadata)


def located(path: Path) -> Path:
    """The local snapshot of a Hub name like ``org/model``, where there is one; else ``path``."""
    if path.exists() or len(path.parts) != 2:
        return path
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    repository = cache / f"models--{path.parts[0]}--{path.parts[1]}"
    main = repository / "refs" / "main"
    snapshot = repository / "snapshots" / main.read_text().strip() if main.is_file() else path
    return snapshot if snapshot.is_dir() else path


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a checkpoint directory. Raises CheckpointError with the way out."""
    if not path.is_dir():
        if path.exists():
            raise CheckpointError(f"{path} is a file; name the directory that holds {CONFIG}")
        raise CheckpointError(
            f"{path} is not here. For a model of the Hugging Face Hub name the local snapshot; "
            "`hf download NAME` fetches it and prints its directory"
        )
    file = path / CONFIG
    if not file.exists():
        raise CheckpointError(_no_config(path, file))
    config = safetensors_file.read_json(_text(file), file)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: must be a JSON object, is a {type(config).__name__}")
    return config


def read_checkpoint(path: Path) -> Checkpoint:
    """Read config and headers. Raises CheckpointError when a part cannot be made sense of."""
    config = read_config(path)
    index = _read_index(path / INDEX)
    files = sorted(path.glob("*.safetensors"))
    if not files and not index:
        return _read_torch(path, config)
    reading = _Reading()
    listed = set(index["weight_map"].values()) if index else None
    for file in files:
        # As SGLang does: an index decides, and beside model.safetensors Mistral's file is a copy.
        if listed is None and len(files) == 2 and file.name == "consolidated.safetensors":
            continue
        if listed is not None and file.name not in listed:
            reading.unlisted.append(file.name)
            continue
        reading.add(file.name, *safetensors_file.read_header(_resolved(file), file.name))
    return reading.checkpoint(path, config, index)


def _read_torch(path: Path, config: dict[str, Any]) -> Checkpoint:
    files = [
        file
        for file in sorted(path.glob("*.bin"))
        if file.name.startswith(("pytorch_model", "model"))
    ]
    if not files:
        found = sorted(file.name for file in path.iterdir())[:8]
        raise CheckpointError(
            f"{path}: no *.safetensors and no pytorch_model*.bin among {found}; "
            "download the weights, or point at the directory that holds them"
        )
    reading = _Reading()
    for file in files:
        reading.add(file.name, {}, torch_file.read_tensors(_resolved(file), file.name))
    return reading.checkpoint(path, config, _read_index(path / TORCH_INDEX))


@dataclass
class _Reading:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    duplicated: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)

    def add(self, file: str, metadata: dict[str, str], tensors: list[Tensor]) -> None:
        self.metadata[file] = metadata
        for tensor in tensors:
            if tensor.name in self.tensors:
                self.duplicated.append(tensor.name)
            self.tensors[tensor.name] = tensor

    def checkpoint(
        self, path: Path, config: dict[str, Any], index: dict[str, Any] | None
    ) -> Checkpoint:
        weight_map: Mapping[str, str] = index["weight_map"] if index else {}
        missing = sorted(set(weight_map.values()) - set(self.metadata))
        misplaced = [
            name
            for name, file in weight_map.items()
            if file in self.metadata and name not in self.tensors
        ]
        for name, file in weight_map.items():
            if file in missing and name not in self.tensors:
                self.tensors[name] = Tensor(name, file, None, None, None)
        return Checkpoint(
            path=path,
            config=config,
            tensors=self.tensors,
            metadata=self.metadata,
            index=index,
            missing_files=tuple(missing),
            unlisted_files=tuple(self.unlisted),
            misplaced=tuple(misplaced),
            duplicated=tuple(self.duplicated),
        )


def _read_index(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    index = safetensors_file.read_json(_text(path), path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    files: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    named = all(isinstance(file, str) for file in files)
    if not named or any(Path(file).name != file or not file for file in set(files)):
        raise CheckpointError(
            f"{path}: needs a weight_map from tensor names to files of this directory; "
            "download it again"
        )
    return index


def _resolved(file: Path) -> Path:
    try:
        return file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{file}: a link to a file that is not here ({error.__class__.__name__}); "
            "run the download again"
        ) from error


def _text(file: Path) -> str:
    try:
        return _resolved(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: no UTF-8 text ({error.reason}); download again") from error


def _no_config(path: Path, file: Path) -> str:
    if file.is_symlink():
        return f"{file}: a link to a file that is not here; run the download again"
    snapshots = sorted(path.glob("snapshots/*/"))
    if snapshots:
        return f"{path} is a Hub cache folder; name its snapshot: {snapshots[-1]}"
    if any(path.glob("*.gguf")):
        return f"{path} holds GGUF; SGLang drafts with safetensors checkpoints, get that one"
    if (path / "params.json").exists():
        return f"{path} is in Mistral's own format (params.json), which this check does not read"
    if not any(path.iterdir()):
        return f"{path} is empty; download the checkpoint into it"
    return f"{path}: no {CONFIG}; name the directory of the checkpoint"


def dump_config(config: dict[str, Any]) -> str:
    """``config.json`` as the Hugging Face libraries write it."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
