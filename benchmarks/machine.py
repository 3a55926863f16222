"""What a measurement on the processor depends on, for its raw result; no name of the machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """``load_average`` is that of the last minute: what else ran when the measurement began."""
    info = dict(
        [part.strip() for part in line.split(":", 1)]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    )
    return {
        "processor": info.get("model name", platform.machine()),
        "processors": os.cpu_count(),
        "virtual": "hypervisor" in info.get("flags", "").split(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def write(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"raw result: {path}", file=sys.stderr)
