"""Write a checkpoint that SGLang loads: never in place, tensor by tensor, all or nothing."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from sglang_spec_ext.ops.check_draft import safetensors_file
from sglang_spec_ext.ops.check_draft.checkpoint import (
    CONFIG,
    INDEX,
    TORCH_INDEX,
    Checkpoint,
    dump_config,
    read_checkpoint,
    read_config,
)
from sglang_spec_ext.ops.check_draft.config import ModelConfig
from sglang_spec_ext.ops.check_draft.edits import Edit
from sglang_spec_ext.ops.check_draft.finding import Finding, FixBy, Severity
from sglang_spec_ext.ops.check_draft.rules import check_read
from sglang_spec_ext.ops.check_draft.server import ServerOptions
from sglang_spec_ext.ops.check_draft.tensors import BITS, CheckpointError, Tensor

# A repair can bring the next thing to light (a flat config shows its vocabulary), but not often.
MAX_ROUNDS = 8

# What a trainer leaves beside the weights, and what SGLang does not load from a draft.
_LEFT_OUT = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")


class ConversionRefused(Exception):
    """The checkpoint cannot be made to load; ``findings`` says why. Nothing was written."""

    def __init__(self, reason: str, findings: list[Finding]) -> None:
        super().__init__(reason)
        self.findings = findings


@dataclass(frozen=True)
class Conversion:
    """What was done: the edits, the files left out, and the check of the result."""

    edits: tuple[Edit, ...]
    left_out: tuple[str, ...]
    findings: list[Finding]


def convert(
    target: Path | None, draft: Path, out: Path, args: ServerOptions | None = None
) -> Conversion:
    """Write to ``out`` a copy of ``draft`` in which whatever a conversion can repair is repaired.

    ``out`` must not exist; it appears complete or not at all. Raises CheckpointError for what
    cannot be read or for a bad ``out``, ConversionRefused when errors would remain that no
    argument of the server can help (or whose cause is not understood).
    """
    args = args or ServerOptions()
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists; name a directory that does not")
    if out.resolve().is_relative_to(draft.resolve()):
        raise CheckpointError(f"{out} is inside the checkpoint; name a directory beside it")
    if not out.resolve().parent.is_dir():
        raise CheckpointError(f"{out.parent} is not here; make it first")
    known = ModelConfig(read_config(target), target) if target is not None else None
    source = read_checkpoint(draft)
    planned, edits = _plan(known, source, args)
    _check_space(source, out)
    building = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    building.mkdir()
    try:
        left_out = _write(source, planned, building)
        findings = check_read(known, read_checkpoint(building), args)
        blocking = _blocking(findings)
        if blocking:
            raise ConversionRefused("the result would still not load", blocking)
        if os.path.lexists(out):
            raise CheckpointError(f"{out} has come into being meanwhile; name another")
        building.rename(out)
    except BaseException:  # interrupted too: leave nothing half done
        shutil.rmtree(building, ignore_errors=True)
        raise
    return Conversion(edits, left_out, findings)


def _plan(
    target: ModelConfig | None, source: Checkpoint, args: ServerOptions
) -> tuple[Checkpoint, tuple[Edit, ...]]:
    checkpoint, done = source, []
    for _ in range(MAX_ROUNDS):
        findings = check_read(target, checkpoint, args)
        edits = [edit for finding in findings for edit in finding.edits]
        if not edits:
            break
        for edit in edits:
            try:
                checkpoint = edit.apply(checkpoint)
            except (ValueError, OverflowError) as error:
                raise ConversionRefused(str(error), findings) from error
            done.append(edit)
    findings = check_read(target, checkpoint, args)
    blocking = _blocking(findings)
    if blocking:
        raise ConversionRefused("a conversion cannot repair this", blocking)
    if source.duplicated or source.unlisted_files:
        unclear = [f for f in findings if f.id in ("tensor-duplicated", "file-unlisted")]
        raise ConversionRefused("it is not clear which files belong to the draft", unclear)
    for file in source.metadata:
        for tensor in _of_file(checkpoint, file):
            if tensor.dtype not in BITS and not _unchanged(source, checkpoint, file):
                raise CheckpointError(
                    f"{file}: {tensor.name} is {tensor.dtype}, a type that this tool does not "
                    "know and will not rewrite"
                )
    return checkpoint, tuple(done)


def _blocking(findings: list[Finding]) -> list[Finding]:
    """Errors that are in the checkpoint, not in how it is served."""
    return [f for f in findings if f.severity is Severity.ERROR and f.fix_by is not FixBy.SERVER]


def _check_space(source: Checkpoint, out: Path) -> None:
    files = [*_others(source), *(source.path / file for file in source.metadata)]
    needed = sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(out.resolve().parent).free
    if free < needed:
        raise CheckpointError(
            f"{out.parent}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
        )


# --- writing ----------------------------------------------------------------------------------


def _write(source: Checkpoint, planned: Checkpoint, out: Path) -> tuple[str, ...]:
    """Write ``planned`` into the empty directory ``out``; the names of files not taken along."""
    names = {file: _safetensors_name(file) for file in source.metadata}
    for file, name in names.items():
        if name == file and _unchanged(source, planned, file):
            _copy(source.path / file, out / name)
        else:
            metadata = source.metadata[file] or {"format": "pt"}
            _write_tensors(metadata, _of_file(planned, file), out / name)
    others = _others(source)
    for other in others:
        _copy(other, out / other.name)
    if planned.config == source.config:
        _copy(source.path / CONFIG, out / CONFIG)
    else:
        _write_text(dump_config(planned.config), out / CONFIG)
    if source.index is not None:
        _write_index(source, planned, names, out)
    taken = {*names, CONFIG, INDEX, TORCH_INDEX, *(file.name for file in others)}
    return tuple(sorted(file.name for file in source.path.iterdir() if file.name not in taken))


def _write_tensors(metadata: dict[str, str], tensors: list[Tensor], file: Path) -> None:
    with file.open("xb") as target:
        target.write(safetensors_file.header_bytes(metadata, tensors))
        for tensor in tensors:
            written = 0
            assert tensor.source is not None
            for chunk in tensor.source.chunks():
                written += target.write(chunk)
            if written != tensor.nbytes:
                raise CheckpointError(
                    f"{tensor.file}: {tensor.name} has {written} bytes, {tensor.nbytes} expected"
                )
        target.flush()
        os.fsync(target.fileno())


def _of_file(checkpoint: Checkpoint, file: str) -> list[Tensor]:
    return [tensor for tensor in checkpoint.tensors.values() if tensor.file == file]


def _unchanged(source: Checkpoint, planned: Checkpoint, file: str) -> bool:
    return _of_file(source, file) == _of_file(planned, file)


def _write_index(source: Checkpoint, planned: Checkpoint, names: dict[str, str], out: Path) -> None:
    assert source.index is not None
    weight_map = {name: names[tensor.file] for name, tensor in planned.tensors.items()}
    if weight_map == source.index["weight_map"] and not source.from_torch:
        _copy(source.path / INDEX, out / INDEX)
    else:
        index = {**source.index, "weight_map": dict(sorted(weight_map.items()))}
        _write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", out / INDEX)


def _others(source: Checkpoint) -> list[Path]:
    """Files that go along as they are: tokenizer, licence, whatever else is no weight."""
    ours = {*source.metadata, CONFIG, INDEX, TORCH_INDEX}
    return [
        file
        for file in sorted(source.path.iterdir())
        if file.name not in ours and file.is_file() and file.suffix not in _LEFT_OUT
    ]


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("xb") as writing:
        shutil.copyfileobj(reading, writing, 16 << 20)
        writing.flush()
        os.fsync(writing.fileno())


def _write_text(text: str, file: Path) -> None:
    with file.open("x", encoding="utf-8") as target:
        target.write(text)
        target.flush()
        os.fsync(target.fileno())


def _safetensors_name(file: str) -> str:
    """`pytorch_model-00001-of-00002.bin` becomes `model-00001-of-00002.safetensors`."""
    if not file.endswith(".bin"):
        return file
    return file.removeprefix("pytorch_").removesuffix(".bin") + ".safetensors"
