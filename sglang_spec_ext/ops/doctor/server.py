"""What a running server says about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import requests

from sglang_spec_ext.compat.releases import nearest
from sglang_spec_ext.observe import CONFIRMATION
from sglang_spec_ext.ops.address import reachable, session
from sglang_spec_ext.ops.preflight.flags import recorded
from sglang_spec_ext.runtime_state import STATE_KEY

TIMEOUT = 30.0  # seconds; the schedulers answer between two of their steps
# The arguments that decide how a server speculates. Nothing else is shown: no key can be.
SHOWN = (
    "tp_size",
    "dp_size",
    "pp_size",
    "nnodes",
    "device",
    "dtype",
    "quantization",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "page_size",
    "context_length",
    "mem_fraction_static",
    "max_running_requests",
    "chunked_prefill_size",
    "enable_mixed_chunk",
    "enable_dp_attention",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "disable_cuda_graph",
    "cuda_graph_max_bs",
    "cuda_graph_max_bs_decode",
    "enable_metrics",
    "tokenizer_worker_num",
)


class NoAnswer(Exception):
    """The server could not be asked; the message says why and what to do."""


@dataclass(frozen=True)
class Server:
    """One running server.

    Attributes:
        info: the answer of /server_info.
        states: per data-parallel rank, what its scheduler says about itself.
    """

    url: str
    info: dict[str, Any]
    states: tuple[dict[str, Any], ...] = field(default=())

    @property
    def version(self) -> str:
        return str(self.info.get("version", "?"))

    @property
    def ours(self) -> list[dict[str, Any]]:
        """The plugin's state in each scheduler that has one."""
        return [state[STATE_KEY] for state in self.states if isinstance(state.get(STATE_KEY), dict)]

    @property
    def launched_by_us(self) -> bool:
        """Whether the launcher bound the plugin and had each scheduler process confirm it."""
        return bool(self.info.get(CONFIRMATION))

    @property
    def flags(self) -> dict[str, Any]:
        """Effective arguments that matter here and are not what the release has by default."""
        names = [name for name in self.info if name.startswith("speculative_")]
        return {
            name: self.info[name]
            for name in (*names, *SHOWN)
            if self.info.get(name) not in (None, False, "", [], self._default(name))
        }

    def _default(self, name: str) -> Any:
        try:
            flag = recorded(nearest(self.version)[0]).by_dest.get(name)
        except ValueError:
            return None  # a release of which nothing is recorded
        return flag.default if flag else None

    @property
    def cap(self) -> int | None:
        """Requests that may run at once in one scheduler."""
        for state in self.states:
            value = state.get("effective_max_running_requests_per_dp")
            if isinstance(value, int):
                return value
        return None

    @property
    def accept_length(self) -> float | None:
        """SGLang's own average over the server's life, of its first scheduler."""
        for state in self.states:
            value = state.get("avg_spec_accept_length")
            if isinstance(value, int | float):
                return float(value)
        return None


def ask(url: str, api_key: str) -> Server:
    """Read /server_info. Raises NoAnswer."""
    base = reachable(url)
    try:
        answer = session(base, api_key).get(f"{base}/server_info", timeout=(5, TIMEOUT))
    except requests.ConnectionError as error:
        raise NoAnswer(f"nothing answers at {base}: is the server up? ({_root(error)})") from error
    except requests.Timeout as error:
        raise NoAnswer(
            f"{base} takes longer than {TIMEOUT:.0f} s: its schedulers are busy starting, or dead. "
            f"See: sglang-spec-ext wait --url {base}"
        ) from error
    except requests.RequestException as error:
        raise NoAnswer(f"{base} cannot be asked: {type(error).__name__}") from error
    if answer.status_code in (401, 403):
        raise NoAnswer(f"{base} wants a key: give it with --api-key or SGLANG_API_KEY")
    try:
        info = answer.json()
    except ValueError:
        info = None
    if answer.status_code != 200 or not isinstance(info, dict) or "version" not in info:
        raise NoAnswer(f"{base}/server_info answers HTTP {answer.status_code}: no SGLang server?")
    states = info.get("internal_states")
    found = tuple(s for s in states if isinstance(s, dict)) if isinstance(states, list) else ()
    return Server(base, info, found)


def _root(error: BaseException) -> str:
    """The innermost cause's last words: `Connection refused` out of four nested exceptions."""
    return str(error).rsplit("] ", 1)[-1].rstrip("')\"")[:80]
