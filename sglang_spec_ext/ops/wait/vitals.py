"""What the operating system knows about the server's processes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

import psutil

from sglang_spec_ext.ops import nvidia
from sglang_spec_ext.ops.wait.liveness import MEGABYTE, Vitals

COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "ninja", "cudafe++", "hipcc", "cc1plus"})
_SCHEDULER = "sglang::scheduler"
_GPU_INTERVAL = 15.0  # seconds; nvidia-smi wakes the driver
_GPU_TIMEOUT = 10.0  # of it, during which nothing else is looked at


class ProcessWatch:
    """Looks at the server's main process and all below it. Never signals any of them."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._popen = popen  # set when we started it: only its parent learns the exit code
        self._schedulers: dict[int, tuple[psutil.Process, str]] = {}
        self._oom_file = _oom_file(pid)
        self._oom_before = _oom_kills(self._oom_file)
        self._gpu_asked = 0.0
        self._started: float | None = None
        try:
            self._main: psutil.Process | None = psutil.Process(pid)
            self._started = self._main.create_time()
        except psutil.Error:
            self._main = None

    @property
    def scheduler_pids(self) -> list[int]:
        return list(self._schedulers)

    def look(self, now: float, *, ask_gpu: bool = False) -> Vitals:
        """The state right now; ``now`` is the caller's clock. Costs a walk over the tree."""
        code = self._popen.poll() if self._popen is not None else None
        oom = max(_oom_kills(self._oom_file) - self._oom_before, 0)
        if self._main is None or code is not None or not _runs(self._main):
            return Vitals(alive=False, exit_code=code, oom_kills=oom)
        started = None if self._started is None else now - (time.time() - self._started)
        family = [self._main]
        with contextlib.suppress(psutil.Error):
            family += self._main.children(recursive=True)
        cpu, read, compilers = 0.0, 0, set[str]()
        for process in family:
            with contextlib.suppress(psutil.Error):
                name = process.name()
                if name in COMPILERS:
                    compilers.add(name)
                self._remember_scheduler(process, name)
                times = process.cpu_times()
                # What ended children used counts too, or a finished compiler would take it away.
                cpu += times.user + times.system + times.children_user + times.children_system
                read += process.io_counters().read_bytes
        ended = [rank for process, rank in self._schedulers.values() if not _runs(process)]
        gpu = None
        if ask_gpu and now - self._gpu_asked > _GPU_INTERVAL:
            self._gpu_asked = now
            gpu = _gpu_bytes({process.pid for process in family})
        return Vitals(
            alive=True,
            started_at=started,
            schedulers=tuple(
                rank for process, rank in self._schedulers.values() if rank not in ended
            ),
            lost=tuple(ended),
            cpu_seconds=cpu,
            read_bytes=read,
            gpu_bytes=gpu,
            compilers=tuple(sorted(compilers)),
            oom_kills=oom,
        )

    def _remember_scheduler(self, process: psutil.Process, name: str) -> None:
        """A scheduler names itself once it has started; only then can it be missed.

        One that ended before we came has kept its short name if nobody has waited for it.
        """
        if process.pid in self._schedulers or not name.startswith(_SCHEDULER[:15]):
            return
        if process.status() == psutil.STATUS_ZOMBIE:
            self._schedulers[process.pid] = (process, f"(pid {process.pid})")
            return
        title = (process.cmdline() or [""])[0]
        if title.startswith(_SCHEDULER):
            rank = title.removeprefix(_SCHEDULER).strip("_ ").replace("_", " ")
            self._schedulers[process.pid] = (process, rank or f"(pid {process.pid})")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _oom_file(pid: int) -> Path | None:
    """The memory events of the process's own control group, where there is one (version 2)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                events = Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events"
                return events if events.exists() else None
    return None


def _oom_kills(events: Path | None) -> int:
    if events is None:
        return 0
    with contextlib.suppress(OSError, ValueError):
        for line in events.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _gpu_bytes(pids: set[int]) -> int | None:
    """GPU memory that these processes hold; None where nvidia-smi does not tell."""
    ours = {str(pid) for pid in pids}
    rows = nvidia.ask("--query-compute-apps=pid,used_gpu_memory", timeout=_GPU_TIMEOUT)
    held = [int(used) for pid, used in rows if pid in ours and used.isdigit()]
    return sum(held) * MEGABYTE if held else None
