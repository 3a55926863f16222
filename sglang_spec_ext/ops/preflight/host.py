"""Rules about this box: port, model files, GPUs, disks. Looks only; starts and changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_spec_ext.ops import check_draft, nvidia
from sglang_spec_ext.ops.check_draft.checkpoint import Checkpoint, read_checkpoint
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity
from sglang_spec_ext.ops.check_draft.tensors import BITS, CheckpointError
from sglang_spec_ext.ops.preflight.setup import Setup

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
DEFAULT_PORT = 30000
GIGABYTE = 1 << 30
LEAST_SHARED_MEMORY = GIGABYTE  # per box, with several ranks; Docker's default is 64 MB
BUSY = 0.9  # of a GPU's memory should be free


def port(setup: Setup) -> Iterator[Finding]:
    """Whether somebody already listens where the server wants to."""
    number = setup.number("port", DEFAULT_PORT) or DEFAULT_PORT
    host = str(setup.get("host") or "127.0.0.1")
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host
    try:
        with socket.create_connection((host, number), timeout=2):
            pass
    except OSError:
        return
    owner = _listener(number)
    yield Finding(
        "port-taken",
        ERROR,
        f"something already listens on {host}:{number}{f' ({owner})' if owner else ''}",
        "stop it, or choose another --port",
    )


def _listener(number: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.laddr and connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr.port == number and connection.pid:
                return f"pid {connection.pid}, {psutil.Process(connection.pid).name()}"
    except (psutil.Error, OSError):
        return ""
    return ""


def models(setup: Setup) -> Iterator[Finding]:
    """The files of target and draft, and whether the draft fits the target."""
    target, draft = setup.get("model_path"), setup.get("speculative_draft_model_path")
    target_files = None
    if target:
        target_files = yield from _model("--model-path", str(target), setup)
    if draft and draft != target and setup.algorithm is not None:
        yield from _model("--speculative-draft-model-path", str(draft), setup)
    if target_files is not None:
        yield from _memory(setup, _size(target_files))
    if target and draft and draft != target and setup.algorithm in ("EAGLE", "EAGLE3"):
        yield from _pair(setup, Path(target), Path(draft))


def _model(flag: str, name: str, setup: Setup) -> Generator[Finding, None, Checkpoint | None]:
    """Findings about one model; returns its checkpoint if it is local and readable."""
    path = Path(name)
    if not path.exists():
        looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
        if looks_local:
            yield Finding("no-model", ERROR, f"{flag} {name} does not exist", "correct the path")
        else:
            yield from _hub(flag, name, setup)
        return None
    if path.is_file():
        return None  # a GGUF file, for example
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError as error:
        severity = NOTE if setup.get("load_format") == "dummy" else ERROR
        yield Finding("model-files", severity, f"{flag}: {error}")
        return None
    if checkpoint.missing_files:
        first = ", ".join(checkpoint.missing_files[:3])
        yield Finding(
            "model-files",
            ERROR,
            f"{flag} {name}: {len(checkpoint.missing_files)} shards are missing, first: {first}",
            "finish the download",
        )
    return checkpoint


def _hub(flag: str, name: str, setup: Setup) -> Iterator[Finding]:
    home = Path(setup.environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(setup.environment.get("HF_HUB_CACHE") or home / "hub")
    if (cache / f"models--{name.replace('/', '--')}" / "snapshots").is_dir():
        return
    offline = setup.environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    folder = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(folder).free // GIGABYTE
    yield Finding(
        "model-download",
        ERROR if offline else NOTE,
        f"{flag} {name} is neither a local directory nor in the cache {cache} ({free} GB free)"
        + (", and HF_HUB_OFFLINE forbids to fetch it" if offline else ": it will be downloaded"),
        f"fetch it before: hf download {name}" if offline else "",
    )


def _pair(setup: Setup, target: Path, draft: Path) -> Iterator[Finding]:
    """check-draft's verdict, when both are here."""
    if not (target.is_dir() and draft.is_dir()):
        return
    options = check_draft.ServerOptions(
        release=setup.release,
        algorithm=setup.algorithm,
        attention_backend=setup.get("attention_backend"),
        prefill_attention_backend=setup.get("prefill_attention_backend"),
        decode_attention_backend=setup.get("decode_attention_backend"),
        draft_attention_backend=setup.get("speculative_draft_attention_backend"),
        context_length=setup.number("context_length"),
        dtype=setup.get("dtype"),
        quantization=setup.get("quantization"),
        draft_quantization=setup.get("speculative_draft_model_quantization"),
        token_map=setup.get("speculative_token_map"),
        disable_cuda_graph=setup.graphs_off,
        plugin=setup.has_hooks,
    )
    try:
        found = check_draft.check(target, draft, options)
    except (CheckpointError, ValueError):
        return  # said before, by the files themselves
    for each in found:
        fix = each.fix or ""
        yield Finding(f"draft:{each.id}", each.severity, each.message, fix)


def _size(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors whose headers could be read."""
    total = 0
    for tensor in checkpoint.tensors.values():
        if tensor.shape is None or tensor.dtype not in BITS:
            continue
        elements = 1
        for length in tensor.shape:
            elements *= length
        total += elements * BITS[tensor.dtype] // 8
    return total


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi sees it; memory in bytes."""

    index: int
    total: int
    free: int


def gpus() -> list[Gpu]:
    """All GPUs of this box; empty where there is none or no nvidia-smi."""
    found = []
    for row in nvidia.ask("--query-gpu=index,memory.total,memory.free"):
        if all(cell.isdigit() for cell in row):
            index, total, free = (int(cell) for cell in row)
            found.append(Gpu(index, total << 20, free << 20))
    return found


def gpu_users() -> list[str]:
    """Processes that hold GPU memory, as `pid name`."""
    rows = nvidia.ask("--query-compute-apps=pid,process_name,used_gpu_memory")
    return [f"pid {pid} {Path(name).name} ({used} MB)" for pid, name, used in rows]


def _visible(setup: Setup, all_gpus: list[Gpu]) -> list[Gpu]:
    chosen = setup.environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return all_gpus
    indices = [part.strip() for part in chosen.split(",")]
    return [gpu for gpu in all_gpus if str(gpu.index) in indices]


def _memory(setup: Setup, weights: int) -> Iterator[Finding]:
    """Whether the target's weights fit on the GPUs; no judgement where there is no GPU."""
    visible = _visible(setup, gpus())
    if not visible or setup.get("device") == "cpu":
        return
    ranks = (setup.number("tp_size", 1) or 1) * (setup.number("pp_size", 1) or 1)
    base = setup.number("base_gpu_id", 0) or 0
    used = visible[base : base + ranks]
    if len(used) < min(ranks, 8) and (setup.number("nnodes", 1) or 1) == 1:
        yield Finding(
            "too-few-gpus",
            ERROR,
            f"{ranks} GPUs are asked for (--tp-size times --pp-size), {len(visible)} are visible",
            "lower --tp-size, or look at CUDA_VISIBLE_DEVICES",
        )
        return
    each = weights // ranks
    least = min(used, key=lambda gpu: gpu.free)
    if each > least.free:
        yield Finding(
            "gpu-memory",
            ERROR,
            f"the target needs about {each // GIGABYTE} GB per GPU, GPU {least.index} has "
            f"{least.free // GIGABYTE} of {least.total // GIGABYTE} GB free",
            "free the GPU, raise --tp-size, or take a smaller or quantised target",
        )
    elif least.free < BUSY * least.total:
        users = gpu_users()
        yield Finding(
            "gpu-busy",
            WARNING,
            f"GPU {least.index} has only {least.free // GIGABYTE} of {least.total // GIGABYTE} GB "
            f"free; held by {', '.join(users[:4]) or 'processes that cannot be seen from here'}",
            "stop them, or lower --mem-fraction-static",
        )


def shared_memory(setup: Setup) -> Iterator[Finding]:
    """Ranks talk through /dev/shm; containers get 64 MB of it by default."""
    ranks = (setup.number("tp_size", 1) or 1) * setup.dp_workers
    folder = Path("/dev/shm")
    if ranks < 2 or not folder.is_dir():
        return
    total = shutil.disk_usage(folder).total
    if total < LEAST_SHARED_MEMORY:
        yield Finding(
            "shared-memory",
            WARNING,
            f"/dev/shm has {total >> 20} MB for {ranks} ranks",
            "run the container with --shm-size 32g or --ipc=host",
        )


def disk(setup: Setup) -> Iterator[Finding]:
    """Kernels are compiled into caches below the home directory."""
    home = Path(setup.environment.get("HOME") or os.path.expanduser("~"))
    if home.is_dir() and (free := shutil.disk_usage(home).free) < 2 * GIGABYTE:
        yield Finding(
            "disk-full",
            WARNING,
            f"only {free >> 20} MB are free below {home}, where compiled kernels are kept",
            "make room, or point TORCHINDUCTOR_CACHE_DIR and FLASHINFER_WORKSPACE_BASE elsewhere",
        )


RULES = (port, models, shared_memory, disk)
