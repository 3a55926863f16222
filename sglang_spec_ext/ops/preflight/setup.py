"""Everything that the rules look at: the reading, the models' configs, the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_spec_ext.args import (
    CHECK_KEYWORD,
    ENV_NAMES,
    KEYWORDS,
    Settings,
    SettingsError,
    build,
    wants_hooks,
)
from sglang_spec_ext.compat.releases import RELEASES
from sglang_spec_ext.ops.check_draft.checkpoint import read_config
from sglang_spec_ext.ops.check_draft.server import truth
from sglang_spec_ext.ops.check_draft.tensors import CheckpointError
from sglang_spec_ext.ops.preflight.reading import Reading

EAGLE_FAMILY = ("EAGLE", "EAGLE3", "STANDALONE")
DEFAULT_CAP = 48  # what SGLang sets under speculation when --max-running-requests is not given
OWN_CAP = {"DeepseekV4ForCausalLM": 256}


@dataclass(frozen=True)
class Setup:
    """One command, ready to be judged for ``release`` (one of RELEASES).

    ``target`` and ``draft`` are the configs of local models; empty where there is none to read.
    """

    release: str
    reading: Reading
    environment: Mapping[str, str]
    target: Mapping[str, Any]
    draft: Mapping[str, Any]

    def get(self, dest: str, default: Any = None) -> Any:
        return self.reading.get(dest, default)

    def given(self, dest: str) -> bool:
        return dest in self.reading.values

    def number(self, dest: str, default: int | None = None) -> int | None:
        """The value as a number; ``default`` when it is none (that is reported elsewhere)."""
        value = self.get(dest, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @property
    def place(self) -> int:
        """Where the release stands among all that are known, oldest first."""
        return RELEASES.index(self.release)

    def since(self, release: str) -> bool:
        return self.place >= RELEASES.index(release)

    @property
    def algorithm(self) -> str | None:
        """The speculative algorithm as SGLang resolves its name; None without one."""
        name = self.get("speculative_algorithm")
        if not isinstance(name, str):
            return None
        return "EAGLE" if name.upper() == "NEXTN" else name.upper()

    @property
    def topk(self) -> int | None:
        return self.number("speculative_eagle_topk")

    @property
    def architecture(self) -> str | None:
        names = self.target.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else None

    @property
    def attention_backends(self) -> set[str]:
        """Backends that were asked for; empty when SGLang chooses."""
        dests = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        return {value for dest in dests if isinstance(value := self.get(dest), str)}

    @property
    def attention_dp(self) -> bool:
        asked = bool(self.get("enable_dp_attention")) and (self.number("dp_size", 1) or 1) > 1
        return asked or (self.number("attn_dp_size", 1) or 1) > 1

    @property
    def dp_workers(self) -> int:
        """How many schedulers share the requests."""
        return (self.number("dp_size", 1) or 1) * (self.number("attn_dp_size", 1) or 1)

    def settings(self) -> Settings | None:
        """Our own settings, from flags or from the environment. Raises SettingsError."""
        raw = {name: self.get(dest) for name, dest in KEYWORDS.items()}
        if all(value is None for value in raw.values()):
            raw = {name: self.environment.get(variable) for name, variable in ENV_NAMES.items()}
            return build(names=ENV_NAMES, **raw)
        return build(**raw)

    @property
    def threshold(self) -> int | None:
        try:
            settings = self.settings()
        except SettingsError:
            return None
        return settings.threshold if settings else None

    @property
    def running_cap(self) -> int | None:
        """Requests that may run at once on the whole server; None where SGLang computes it."""
        given = self.number("max_running_requests")
        if given is not None:
            return given
        if self.algorithm is None or self.threshold is not None:
            return None  # with our flag the cap stays what it is without speculation
        return OWN_CAP.get(self.architecture or "", DEFAULT_CAP)

    @property
    def largest_graph(self) -> int | None:
        """The largest captured decode batch as far as it was asked for."""
        for dest in ("cuda_graph_bs_decode", "cuda_graph_bs"):
            sizes = self.get(dest)
            if isinstance(sizes, list) and sizes and all(isinstance(s, int) for s in sizes):
                return max(sizes)
        for dest in ("cuda_graph_max_bs_decode", "cuda_graph_max_bs"):
            if (largest := self.number(dest)) is not None:
                return largest
        return None

    @property
    def graphs_off(self) -> bool:
        return bool(self.get("disable_cuda_graph")) or (
            self.get("cuda_graph_backend_decode") == "disabled"
        )

    @property
    def has_hooks(self) -> bool:
        """Whether the target gets this package's hooks: the plugin, which has flags, gives them."""
        try:
            return CHECK_KEYWORD in self.reading.table.by_dest and wants_hooks(
                self.algorithm, self.environment
            )
        except SettingsError:
            return False

    @property
    def spec_v2_asked(self) -> bool | None:
        """What SGLANG_ENABLE_SPEC_V2 says; None where it says nothing."""
        return truth(self.environment.get("SGLANG_ENABLE_SPEC_V2", ""))

    @property
    def overlap_off(self) -> bool:
        """Whether SGLang runs EAGLE and its kin without the overlap schedule: on the v1 worker,
        in releases that have both."""
        off = bool(self.get("disable_overlap_schedule"))
        if not self.since("0.5.11"):
            return not self.spec_v2_asked
        if not self.since("0.5.13.post1"):
            return off or (self.topk or 1) > 1 or self.spec_v2_asked is False
        return off

    def namespace(self) -> SimpleNamespace:
        """All values, given or by default, as the plugin's own refusals want them."""
        dests = {*self.reading.table.by_dest, *self.reading.values}
        values = {dest: self.get(dest) for dest in dests}
        values["speculative_algorithm"] = self.algorithm
        values["disable_overlap_schedule"] = self.overlap_off
        return SimpleNamespace(**values)


def local_config(path: Any) -> Mapping[str, Any]:
    """The config.json of a local model directory; empty when there is none that can be read."""
    if not isinstance(path, str) or not Path(path).is_dir():
        return {}
    try:
        return read_config(Path(path))
    except CheckpointError:
        return {}
