"""What one boot's `server_args=` line says about the ranks, the draft and the probe to expect.

The line is many kilobytes and may hold keys and tokens: only the fields below are ever read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIELDS = (
    "model_path",
    "quantization",
    "device",
    "tp_size",
    "pp_size",
    "dp_size",
    "attn_dp_size",  # 0.5.22 on; older releases put its value into dp_size
    "enable_dp_attention",
    "nnodes",
    "node_rank",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "skip_server_warmup",
    "disaggregation_mode",
)
_VALUE = r"['\"]?(?<!\w){name}['\"]?(?:=|: )(?P<value>'[^']*'|\"[^\"]*\"|[^,)}}\s]+)"
_WITHOUT_DRAFT = ("NGRAM",)


@dataclass(frozen=True)
class BootArguments:
    """Effective values of one boot; the defaults are those of a server that tells nothing."""

    model_path: str = ""
    quantization: str = ""
    device: str = ""
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    attention_dp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    speculative_algorithm: str = ""
    speculative_draft_model_path: str = ""
    skip_server_warmup: bool = False
    disaggregation_mode: str = "null"

    @property
    def has_draft(self) -> bool:
        return bool(self.speculative_algorithm) and (
            self.speculative_algorithm.upper() not in _WITHOUT_DRAFT
        )

    @property
    def dp_ranks(self) -> int:
        """How many data-parallel groups answer requests, each to be probed."""
        return self.dp_size * self.attention_dp_size

    @property
    def ranks(self) -> tuple[str, ...]:
        """The scheduler processes of this node as their log lines name them."""
        names = []
        for dp in range(self.dp_size):
            for pp in range(self.pp_size):
                for tp in range(self.tp_size):
                    group = tp * self.attention_dp_size // self.tp_size
                    shown_dp = group if self.attention_dp_size > 1 else dp
                    parts = (
                        f"DP{shown_dp}" if self.dp_ranks > 1 else "",
                        f"PP{pp}" if self.pp_size > 1 else "",
                        f"TP{tp}" if self.tp_size > 1 else "",
                    )
                    names.append(" ".join(part for part in parts if part))
        share = max(len(names) // max(self.nnodes, 1), 1)
        return tuple(names[self.node_rank * share : (self.node_rank + 1) * share])

    @property
    def key(self) -> str:
        """What makes two boots comparable in time."""
        return "|".join(
            str(part)
            for part in (
                self.model_path,
                self.quantization,
                self.device,
                f"tp{self.tp_size}pp{self.pp_size}dp{self.dp_ranks}n{self.nnodes}",
                self.speculative_algorithm,
                self.speculative_draft_model_path,
            )
        )


def read_arguments(line: str) -> BootArguments:
    """Parse `server_args=ServerArgs(a=1, ...)` (dataclass) or `server_args={'a': 1, ...}`."""
    found: dict[str, str] = {}
    for name in _FIELDS:
        match = re.search(_VALUE.format(name=name), line)
        value = match["value"].strip("'\"") if match else "None"
        if value != "None":
            found[name] = value
    dp_size = _count(found.get("dp_size"), 1)
    attention_dp_size = _count(found.get("attn_dp_size"), 1)
    if attention_dp_size == 1 and found.get("enable_dp_attention") == "True":
        dp_size, attention_dp_size = 1, dp_size
    return BootArguments(
        model_path=found.get("model_path", ""),
        quantization=found.get("quantization", ""),
        device=found.get("device", ""),
        tp_size=_count(found.get("tp_size"), 1),
        pp_size=_count(found.get("pp_size"), 1),
        dp_size=dp_size,
        attention_dp_size=attention_dp_size,
        nnodes=_count(found.get("nnodes"), 1),
        node_rank=_count(found.get("node_rank"), 0),
        speculative_algorithm=found.get("speculative_algorithm", ""),
        speculative_draft_model_path=found.get("speculative_draft_model_path", ""),
        skip_server_warmup=found.get("skip_server_warmup") == "True",
        disaggregation_mode=found.get("disaggregation_mode", "null"),
    )


def _count(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default
