"""What nvidia-smi tells about this box."""

from __future__ import annotations

import shutil
import subprocess

TIMEOUT = 20.0  # seconds; it wakes the driver where nothing else has


def ask(query: str, timeout: float = TIMEOUT, only: str | None = None) -> list[list[str]]:
    """The rows of one ``--query-...=COLUMNS``, memory in MiB; none where there is no answer.

    Args:
        timeout: seconds.
        only: GPUs to ask for, as in CUDA_VISIBLE_DEVICES; all without.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits", *([f"--id={only}"] if only else [])],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    columns = query.count(",") + 1
    return [row for row in rows if len(row) == columns]
