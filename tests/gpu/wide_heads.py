"""The tiny pair with heads as wide as an attention kernel wants them, and the same function.

Each head's queries, keys and values get zeros behind; RoPE turns the part that was there; the
queries are scaled up, since attention divides by the root of the width.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def widen(source: Path, target: Path, width: int) -> None:
    """Write the Llama checkpoint of ``source`` to the new folder ``target``, ``width`` per head."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    narrow = config["head_dim"]
    config["head_dim"], config["partial_rotary_factor"] = width, narrow / width
    (target / "config.json").write_text(json.dumps(config))
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        kind = name.rpartition("self_attn.")[2].partition("_proj")[0]
        if kind == "q":
            weight = weight * math.sqrt(width / narrow)
        if kind in ("q", "k", "v"):
            weight = _padded(weight, narrow, width)
        elif kind == "o":
            weight = _padded(weight.T, narrow, width).T
        weights[name] = weight.contiguous()
    save_file(weights, target / "model.safetensors")


def _padded(weight: torch.Tensor, narrow: int, width: int) -> torch.Tensor:
    """[heads * narrow, inputs] -> [heads * width, inputs]"""
    heads = weight.view(-1, narrow, weight.shape[-1])
    wide = weight.new_zeros(heads.shape[0], width, weight.shape[-1])
    wide[:, :narrow] = heads
    return wide.flatten(0, 1)
