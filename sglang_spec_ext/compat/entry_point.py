"""The entry point by which SGLang's plugin loader finds us, and what keeps it from doing so."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

GROUP, NAME = "sglang.srt.plugins", "spec_ext"


def installed() -> bool:
    return any(point.name == NAME for point in metadata.entry_points(group=GROUP))


def hidden_by(environ: Mapping[str, str]) -> str:
    """The ``SGLANG_PLUGINS=...`` that leaves us out, as a lone comma does; empty without one."""
    allowed = environ.get("SGLANG_PLUGINS", "")
    listed = {name.strip() for name in allowed.split(",")}
    return f"SGLANG_PLUGINS={allowed}" if allowed and NAME not in listed else ""
