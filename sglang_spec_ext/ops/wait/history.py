"""How long the phases of earlier boots took on this box, kept under the XDG state directory."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from sglang_spec_ext.ops.wait.patterns import Phase

KEPT = 10  # boots per kind of server
USED = 5  # of them, the newest, for an estimate


def history_file() -> Path:
    """`$XDG_STATE_HOME/sglang-spec-ext/boots.json`, by default below `~/.local/state`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # The specification says to ignore a relative path.
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "sglang-spec-ext" / "boots.json"


class BootHistory:
    """Durations of successful boots, by kind of server (`BootArguments.key`).

    Estimates are a comfort: a file that cannot be read or written never stops a wait.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def expected(self, key: str) -> dict[Phase, float]:
        """Median seconds per phase over the newest boots; empty for the first one."""
        seconds: dict[Phase, list[float]] = {}
        for boot in self._load().get(key, [])[-USED:]:
            for name, value in boot.items():
                if name in _PHASES and isinstance(value, (int, float)):
                    seconds.setdefault(Phase(name), []).append(float(value))
        return {phase: statistics.median(values) for phase, values in seconds.items()}

    def add(self, key: str, durations: dict[Phase, float]) -> None:
        """Keep one more boot."""
        boots = self._load()
        mine = [*boots.get(key, []), {phase.value: round(s, 1) for phase, s in durations.items()}]
        boots[key] = mine[-KEPT:]
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Another wait may read or write at the same time: replace the file as a whole.
            with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=".boots-") as folder:
                fresh = Path(folder, self.path.name)
                fresh.write_text(json.dumps(boots, indent=1), encoding="utf-8")
                fresh.replace(self.path)

    def _load(self) -> dict[str, list[dict[str, Any]]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {
            key: [boot for boot in boots if isinstance(boot, dict)]
            for key, boots in found.items()
            if isinstance(boots, list)
        }


_PHASES = frozenset(phase.value for phase in Phase)
