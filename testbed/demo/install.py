"""The demo's own environment: made once, reused at once, never half-made. Standard library only."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from testbed.demo import DemoError
from testbed.demo.processes import ProcessTree
from testbed.demo.progress import Progress
from testbed.demo.server_log import LogFollower

SGLANG_VERSION = "0.5.23"
OLDEST_PYTHON = (3, 11)
"""What this SGLang asks for; the plugin itself is content with 3.10."""

# Measured on Linux x86-64: 11 GB installed, 5 GB of wheels while pip unpacks them, and as much
# again in pip's download cache.
NEEDED_GB = 21

_STATE = "demo-state.json"
_LOCK = "demo.lock"
_GB = 10**9


class Environment:
    """A virtual environment with SGLang and this checkout, in a folder that the demo owns.

    Several demos may use it at once; while one installs, the others wait.
    """

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._checkout = checkout
        self._lock_fd: int | None = None

    def ensure(self) -> None:
        """Installs what is missing, and keeps a shared lock until this process ends.

        Raises DemoError where that is impossible: a foreign folder, too little disk, no suitable
        Python, a failed installation.
        """
        self._claim_folder()
        self._lock(fcntl.LOCK_SH)
        if not self._is_complete():
            self._unlock()
            self._lock(fcntl.LOCK_EX)
            self._install_missing()  # which finds nothing to do if another demo was faster
            self._unlock()
            self._lock(fcntl.LOCK_SH)

    # -- what is there

    def _state(self) -> dict[str, str]:
        """What has been installed completely, as written after each step."""
        try:
            state: dict[str, str] = json.loads((self.folder / _STATE).read_text())
        except (OSError, ValueError):
            return {}
        return state if os.access(self.python, os.X_OK) else {}

    def _is_complete(self) -> bool:
        return self._state() == self._wanted()

    def _wanted(self) -> dict[str, str]:
        return {"sglang": SGLANG_VERSION, "checkout": self._checkout_id()}

    def _checkout_id(self) -> str:
        # The checkout is installed editable: only new metadata needs a new installation.
        metadata = (self._checkout / "pyproject.toml").read_bytes()
        return f"{self._checkout} {hashlib.sha256(metadata).hexdigest()}"

    def _write_state(self, state: dict[str, str]) -> None:
        path = self.folder / _STATE
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(state))
        os.replace(draft, path)

    # -- installing

    def _install_missing(self) -> None:
        if self._state().get("sglang") != SGLANG_VERSION:
            python = suitable_python()
            self._empty_folder()
            check_disk(self.folder)
            print(
                f"Installing SGLang {SGLANG_VERSION} into {self.folder}. This is done once, takes "
                f"some minutes and needs {NEEDED_GB} GB; Ctrl-C stops it.",
                flush=True,
            )
            self._step("environment", [python, "-m", "venv", str(self.folder)])
            self._pip(f"SGLang {SGLANG_VERSION}", [f"sglang=={SGLANG_VERSION}"])
            self._write_state({"sglang": SGLANG_VERSION})
        if not self._is_complete():
            self._pip("this checkout", ["--editable", str(self._checkout)])
            self._write_state(self._wanted())

    def _pip(self, title: str, what: Sequence[str]) -> None:
        command = [str(self.python), "-m", "pip", "install", "--progress-bar", "off"]
        self._step(title, [*command, "--disable-pip-version-check", "--no-input", *what])

    def _step(self, title: str, command: list[str]) -> None:
        progress = Progress(title, sys.stdout)
        follow = PipProgress(self.folder)
        # pip unpacks gigabytes where TMPDIR says; /tmp may be a small RAM disk, and only the
        # environment's own disk has been checked.
        scratch = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.folder))
        log = self.folder / "demo-install.log"
        variables = os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
        # These would send pip's work into another place than this environment.
        for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"):
            variables.pop(name, None)
        try:
            with ProcessTree(command, log, variables) as process:
                lines = LogFollower(log)
                status = None
                while status is None:
                    status = process.exit_status()
                    for line in lines.new_lines():
                        follow.read(line)
                    progress.update(follow.phase, follow.detail())
                    time.sleep(0.2)
        finally:
            progress.clear()
            shutil.rmtree(scratch, ignore_errors=True)
        if status != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise DemoError(
                f"installing {title} failed with exit status {status}; the end of {log}:\n{tail}"
            )
        progress.done("done")

    # -- the folder

    def _claim_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            ours = (self.folder / _LOCK).exists() or not any(self.folder.iterdir())
            if ours:
                (self.folder / _LOCK).touch()
        except OSError as error:
            raise DemoError(
                f"cannot write to {self.folder} ({error.strerror}): choose another place "
                "with --env DIR"
            ) from None
        if not ours:
            raise DemoError(
                f"{self.folder} holds something that this demo did not make: choose an empty or "
                "new folder with --env DIR, or use an environment that has SGLang with "
                "--python PATH"
            )

    def _empty_folder(self) -> None:
        """Removes an older or interrupted installation: pip may have left half a package."""
        (self.folder / _STATE).unlink(missing_ok=True)
        for entry in self.folder.iterdir():
            if entry.name == _LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _lock(self, kind: int) -> None:
        if self._lock_fd is None:
            self._lock_fd = os.open(self.folder / _LOCK, os.O_RDWR)
            # The demo goes on in the environment's Python by exec and keeps its lock so.
            os.set_inheritable(self._lock_fd, True)
        progress = Progress("waiting for another demo", sys.stdout)
        waited = False
        while True:
            try:
                fcntl.flock(self._lock_fd, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                doing = "installs" if kind == fcntl.LOCK_SH else "uses"
                progress.update(f"it {doing} {self.folder}")
                waited = True
                time.sleep(0.5)
        if waited:
            progress.done("it is finished")

    def _unlock(self) -> None:
        assert self._lock_fd is not None
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)


class PipProgress:
    """Turns pip's output into a phase and a detail."""

    def __init__(self, folder: Path) -> None:
        self.phase = "starting"
        self._folder = folder
        self._current = ""
        self._before = 0
        self._total = 0

    def read(self, line: str) -> None:
        """Takes one line of output; unknown ones change nothing."""
        line = line.strip()
        if match := re.match(r"Collecting ([^\s(]+)", line):
            self.phase, self._current = "choosing and downloading packages", match[1]
        elif match := re.match(r"(?:Downloading|Using cached) (\S+)(?: \((.+)\))?", line):
            name = match[1].rpartition("/")[2]
            size = f" ({match[2]})" if match[2] else ""
            # Metadata is a matter of kilobytes; the name of its package is on screen already.
            if not name.endswith(".metadata"):
                self.phase = "choosing and downloading packages"
                self._current = re.split(r"-\d", name)[0] + size
        elif line.startswith(("Building wheel", "Preparing metadata", "Getting requirements")):
            self.phase, self._current = "building", line.partition(":")[0].lower()
        elif match := re.match(r"Installing collected packages: (.+)", line):
            self.phase, self._total = "unpacking", len(match[1].split(", "))
            self._before = self._installed()

    def detail(self) -> str:
        """The package at hand; while unpacking, when pip is silent, a count of those in place."""
        if self.phase != "unpacking":
            return self._current
        return f"{self._installed() - self._before} of {self._total} packages"

    def _installed(self) -> int:
        return sum(1 for _ in self._folder.glob("lib/python*/site-packages/*.dist-info"))


def check_disk(folder: Path, needed_gb: float = NEEDED_GB) -> None:
    """Raises DemoError unless `folder`'s disk has `needed_gb` (10^9 bytes) free."""
    free_gb = shutil.disk_usage(folder).free / _GB
    if free_gb < needed_gb:
        raise DemoError(
            f"the installation needs {needed_gb:.0f} GB of disk and {folder} has {free_gb:.1f} GB "
            f"free: free {needed_gb - free_gb:.1f} GB more, choose another disk with --env DIR, "
            "or use an environment that has SGLang with --python PATH"
        )


def suitable_python() -> str:
    """This Python if SGLang accepts it, else one from PATH. Raises DemoError if there is none."""
    if sys.version_info >= OLDEST_PYTHON:
        return sys.executable
    for minor in (12, 11, 13):
        if found := shutil.which(f"python3.{minor}"):
            return found
    needed = ".".join(map(str, OLDEST_PYTHON))
    raise DemoError(
        f"SGLang {SGLANG_VERSION} needs Python {needed} or newer, this is "
        f"{sys.version.split()[0]} and there is no newer one on PATH: install python3.12 with its "
        "venv module and run the same command again"
    )


def check_environment(checkout: Path) -> None:
    """Raises DemoError unless this very Python has SGLang and the plugin. Reads metadata only."""
    try:
        importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise DemoError(
            f"{sys.executable} has no SGLang: name another with --python PATH, or leave that "
            "option out and the demo makes an environment"
        ) from None
    if "spec_ext" not in importlib.metadata.entry_points(group="sglang.srt.plugins").names:
        raise DemoError(
            f"{sys.executable} has SGLang but not this plugin: run\n"
            f"  {sys.executable} -m pip install --editable {checkout}"
        )
