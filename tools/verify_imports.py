#!/usr/bin/env python3
"""Will SGLang in this environment run with sglang_spec_ext? One line per check, and an exit code.

Run it with the interpreter of the serving environment (or name that one with --python). It
changes nothing, needs only the standard library, and works with and without a GPU. Whatever
may raise, hang or crash (importing torch, SGLang or the plugin) happens in child processes
that are stopped after a timeout.

examples:
  python verify_imports.py                        check this environment
  python verify_imports.py --python /venv/bin/python --json
  python verify_imports.py --release-check sglang-0.5.23-py3-none-any.whl
                                                  would the plugin fit that release?

exit codes:
  0    every check is OK
  1    never chosen here: it is what Python returns when it cannot run this file to its end
  2    at least one FAIL: do not start a server with the plugin's flags
  3    usage: an unknown option, an interpreter or a path that cannot be used
  4    no FAIL, but at least one WARN: it may work, read the line
  130  interrupted (128 + signal number)
SKIP marks a check that an earlier FAIL makes impossible.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import faulthandler
import importlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

PLUGIN_DIST = "sglang-spec-ext"
PLUGIN_PACKAGE = "sglang_spec_ext"
ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT_NAME = "spec_ext"
FIRST_RELEASE_WITH_PLUGINS = "0.5.11"
BOOTSTRAP_FILE = "sglang_spec_ext_bootstrap.pth"
BOOTSTRAP_MODULE = "sglang_spec_ext.compat.bootstrap"
BOOTSTRAP_SWITCH = "SGLANG_SPEC_EXT_BOOTSTRAP"
SEAMS_MODULE = "sglang_spec_ext.seams"
OLDEST_PYTHON = (3, 10)

STATUSES = ("OK", "WARN", "FAIL", "SKIP")
EXIT_OK, EXIT_BROKEN, EXIT_FAIL, EXIT_USAGE, EXIT_WARN = range(5)

# What a driverless machine says when CUDA code is imported; judged only if torch sees no CUDA.
NO_CUDA = re.compile(
    r"lib(cuda|cudart|cublas|cublasLt|nccl|nvidia-ml|nvrtc)\.so[\w.]*: cannot open"
    r"|Found no NVIDIA driver|No CUDA GPUs are available|not compiled with CUDA enabled"
    r"|0 active drivers",
)


# ------------------------------------------------------------------------------------ results


@dataclass
class Check:
    """The outcome of one check.

    `message` is one line for people, the remedy included; `details` are further lines that
    only -v and --json show; `data` holds the facts for machines; `output` is what the child
    processes printed.
    """

    name: str
    status: str
    message: str
    details: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    output: str = ""


def exit_code(checks: list[Check]) -> int:
    statuses = {check.status for check in checks}
    if "FAIL" in statuses:
        return EXIT_FAIL
    return EXIT_WARN if "WARN" in statuses else EXIT_OK


def one_line(text: str, limit: int = 240) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


# --------------------------------------------------------- what is installed, without importing


@dataclass
class Package:
    """Where an import name leads in this interpreter, and what pip's metadata says about it."""

    name: str
    used: Path | None  # what `import name` takes: the package's folder, or a lone .py file
    hollow: list[Path]  # folders of that name without __init__.py: not importable as a package
    others: list[Path]  # further copies on sys.path that `used` hides
    dists: list[importlib.metadata.Distribution]

    @property
    def importable(self) -> bool:
        return self.used is not None and os.path.isdir(self.used)


def find_package(name: str, dist_name: str) -> Package:
    used = None
    with contextlib.suppress(Exception):  # a broken editable finder may raise anything
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            origin = Path(spec.origin)
            used = origin.parent if origin.name == "__init__.py" else origin
    hollow, others = [], []
    for entry in dict.fromkeys(os.path.realpath(path or os.curdir) for path in sys.path):
        copy = Path(entry, name)
        if os.path.isfile(copy / "__init__.py"):
            if used is None or not same_path(copy, used):
                others.append(copy)
        elif os.path.isdir(copy):
            hollow.append(copy)
    dists = {metadata_folder(d): d for d in importlib.metadata.distributions(name=dist_name)}
    return Package(name, used, hollow, others, list(dists.values()))


def same_path(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def metadata_folder(dist: importlib.metadata.Distribution) -> str:
    # There is no public way to ask; on what is no folder on disk, each is its own.
    return str(getattr(dist, "_path", id(dist)))


def dist_version(dist: importlib.metadata.Distribution) -> str:
    try:
        return str(dist.version or "?")
    except Exception:  # METADATA is missing or unreadable; what is raised differs by Python
        return "?"


def read_metadata(dist: importlib.metadata.Distribution, name: str) -> str:
    try:
        return dist.read_text(name) or ""
    except (OSError, UnicodeDecodeError):
        return ""


def code_version(folder: Path) -> str | None:
    """The version that the package's own files state as a literal, or None."""
    for name in ("_version.py", "version.py", "__init__.py"):
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if match:
            return match.group(1)
    return None


def missing_files(dist: importlib.metadata.Distribution) -> list[str]:
    """Python files that pip installed and that are gone."""
    rows = csv.reader(read_metadata(dist, "RECORD").splitlines())
    listed = [row[0] for row in rows if row and row[0].endswith(".py")]
    return [name for name in listed if not os.path.exists(str(dist.locate_file(name)))]


def git_checkout(folder: Path) -> str | None:
    """'git checkout ROOT at COMMIT' when the folder lies in a work tree, read without git."""
    for root in Path(os.path.realpath(folder)).parents:
        if os.path.exists(root / ".git"):
            commit = git_commit(root / ".git")
            return f"git checkout {root}" + (f" at {commit[:9]}" if commit else "")
    return None


def git_commit(git_dir: Path) -> str | None:
    try:
        head = (git_dir / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        ref = head[len("ref: ") :]
        if os.path.isfile(git_dir / ref):
            return (git_dir / ref).read_text().strip()
        for line in (git_dir / "packed-refs").read_text().splitlines():
            if line.endswith(" " + ref):
                return line.split()[0]
    except OSError:
        pass
    return None


def direct_url(dist: importlib.metadata.Distribution | None) -> dict[str, Any]:
    """PEP 610's record of where pip took the package from; empty for a plain index."""
    with contextlib.suppress(ValueError):
        source = json.loads(read_metadata(dist, "direct_url.json")) if dist else {}
        if isinstance(source, dict):
            return source
    return {}


def is_editable(source: dict[str, Any]) -> bool:
    return bool(source.get("dir_info", {}).get("editable"))


def url_path(url: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlparse(url).path)


def reinstall_hint(dist_name: str, dist: importlib.metadata.Distribution | None) -> str:
    source = direct_url(dist)
    if is_editable(source):
        return f"reinstall it: pip install --no-deps -e {url_path(str(source.get('url', '')))}"
    version = dist_version(dist) if dist else "?"
    pin = "" if version == "?" else f"=={version}"
    return f"reinstall it: pip install --force-reinstall --no-deps {dist_name}{pin}"


def how_installed(folder: Path, dist: importlib.metadata.Distribution | None) -> str:
    """Wheel, editable, git checkout or bare files: where this folder came from."""
    source = direct_url(dist)
    url = str(source.get("url", ""))
    if is_editable(source):
        checkout = git_checkout(folder)
        return "editable" + (f", {checkout}" if checkout else "")
    if dist is not None and same_path(Path(str(dist.locate_file(""))), folder.parent):
        if metadata_folder(dist).endswith(".egg-info"):
            return git_checkout(folder) or "source folder (egg-info)"
        if "vcs_info" in source:
            commit = str(source["vcs_info"].get("commit_id", ""))[:9]
            return f"built from {url} at {commit}"
        if "dir_info" in source:
            return f"built from {url_path(url)}"
        return f"wheel from {url}" if url else "wheel"
    if not {"site-packages", "dist-packages"} & set(folder.parts):
        return git_checkout(folder) or "plain folder, not installed by pip"
    return "files without pip metadata"


def check_package(label: str, package: Package, dist_name: str, missing_hint: str) -> Check:
    """One line on an installed package: version, origin, and everything odd about it.

    `missing_hint` says what to do if there is none.
    """
    dist = package.dists[0] if package.dists else None
    reinstall = reinstall_hint(dist_name, dist)
    versions = [dist_version(dist) for dist in package.dists]
    data: dict[str, Any] = {
        "path": str(package.used) if package.used else None,
        "pip_versions": versions,
        "others": [str(path) for path in package.others],
    }
    if not package.importable:
        if package.used is not None:
            text = f"{package.used} is a lone file that hides the package; remove or rename it"
        elif package.hollow:
            text = f"{package.hollow[0]} has no __init__.py (half deleted?); {reinstall}"
        elif package.dists:
            text = f"pip lists {versions[0]} but its files are gone; {reinstall}"
        else:
            text = f"not installed; {missing_hint}"
        return Check(label, "FAIL", text, data=data)

    assert package.used is not None
    stated = code_version(package.used)
    how = how_installed(package.used, dist)
    data.update(version=stated or (versions[0] if versions else None), origin=how)
    problems, details = [], []
    if package.others:
        where = ", ".join(str(path) for path in package.others)
        problems.append(
            f"{len(package.others) + 1} copies on sys.path, this one hides {where}; keep one"
        )
    if stated and versions and stated != versions[0]:
        problems.append(f"pip's metadata says {versions[0]}, the code {stated}; {reinstall}")
    if len(set(versions)) > 1:
        problems.append(f"metadata of several versions ({', '.join(versions)}); {reinstall}")
    if dist is not None:
        gone = missing_files(dist)
        if gone:
            problems.append(f"{len(gone)} of its files are gone (first: {gone[0]}); {reinstall}")
            details += [f"gone: {name}" for name in gone]
        data["missing_files"] = len(gone)
    else:
        problems.append("no pip metadata, so pip does not know of it")
    for shadow in (Path(package.name, "__init__.py"), Path(package.name + ".py")):
        if os.path.isfile(shadow) and not same_path(shadow, package.used / "__init__.py"):
            # `python -m sglang...` puts the current folder first, this script does not.
            problems.append(f"`python -m` from this folder would take ./{shadow} instead")
    message = ", ".join(filter(None, [data["version"], how, str(package.used)]))
    status = "WARN" if problems else "OK"
    return Check(label, status, "; ".join([message, *problems]), details, data)


# ------------------------------------------------------------------------------ child processes


@dataclass
class ProbeRun:
    """What a child process reported: finished steps by name, and how it ended."""

    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: str | None = None  # the step it was in when it ended, None if it finished
    end: str = ""  # why it did not finish
    timed_out: bool = False
    output: str = ""

    def cause(self, step: str) -> str | None:
        """Why the step did not succeed; None if it did."""
        found = self.steps.get(step)
        if found is not None:
            return None if found["ok"] else str(found["cause"])
        return self.end or "not reached"

    def facts(self, step: str) -> dict[str, Any]:
        return dict(self.steps.get(step, {}).get("facts") or {})


def python_flags() -> list[str]:
    """The flags that decide what this interpreter can import, for its children."""
    flags = sys.flags
    chosen = {"-I": flags.isolated, "-E": flags.ignore_environment, "-S": flags.no_site}
    chosen["-s"] = flags.no_user_site
    return [flag for flag, on in chosen.items() if on]


def run_probe(name: str, timeout: float, **arguments: Any) -> ProbeRun:
    """Run PROBES[name] in a process group of its own, which is gone when this returns.

    `timeout` is in seconds and counts from the last step that was begun or finished.
    """
    run = ProbeRun()
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as log, os.fdopen(read_fd, "rb", buffering=0) as reports:
        command = [sys.executable, *python_flags(), os.path.abspath(__file__)]
        command += ["--probe", name, str(write_fd), str(timeout), json.dumps(arguments)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[write_fd],
            start_new_session=True,
        )
        os.close(write_fd)
        try:
            follow(child, reports, run, timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.seek(0)
        run.output = log.read().decode("utf-8", "replace")
    if run.begun is None and child.returncode == 0:
        return run
    if run.timed_out or re.search(r"^Timeout \(\d+:\d\d:\d\d", run.output, re.MULTILINE):
        run.timed_out = True
        run.end = f"did not finish in {timeout:g} s{hanging_at(run.output)}"
    elif child.returncode < 0:
        run.end = f"the process died of {signal.Signals(-child.returncode).name}"
    elif not run.end:
        run.end = f"the process ended with exit code {child.returncode}: {last_line(run.output)}"
    return run


def follow(child: subprocess.Popen[bytes], reports: Any, run: ProbeRun, timeout: float) -> None:
    """Read the child's reports into `run` until it ends or stays silent for too long."""
    # The child's own watchdog, which can say where it hangs, goes first.
    patience = timeout + 5.0
    pending = b""
    deadline = time.monotonic() + patience
    while True:
        ended = child.poll() is not None  # asked first, so that nothing it wrote is missed
        readable = bool(select.select([reports], [], [], 0 if ended else 0.2)[0])
        chunk = reports.read(65536) if readable else b""
        if chunk:
            deadline = time.monotonic() + patience
            *lines, pending = (pending + chunk).split(b"\n")
            for event in map(json.loads, lines):
                take_event(run, event)
        elif ended:
            return
        elif time.monotonic() > deadline:
            run.timed_out = True
            return
        elif readable:  # it has closed the pipe; its exit comes next
            time.sleep(0.05)


def take_event(run: ProbeRun, event: dict[str, Any]) -> None:
    if event["event"] == "begin":
        run.begun = event["step"]
    elif event["event"] == "died":
        run.end = event["cause"]
    else:
        run.steps[event["step"]] = event
        run.begun = None


def hanging_at(output: str) -> str:
    """' (in FILE:LINE)' from the stack that faulthandler dumped, innermost frame first."""
    for dump in reversed(output.split("(most recent call first):\n")[1:]):
        match = re.match(r'\s*File "([^"]+)", line (\d+)', dump)
        if match:
            return f" (in {match.group(1)}:{match.group(2)})"
    return ""


def last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return one_line(lines[-1]) if lines else "it printed nothing"


class Reporter:
    """The child's side: runs steps, reports each, and dies with a stack dump if one hangs."""

    def __init__(self, send: Callable[[dict[str, Any]], None], timeout: float) -> None:
        self.send = send
        self.timeout = timeout

    def attempt(self, step: str, action: Callable[[], dict[str, Any] | None]) -> bool:
        """Run `action`; it returns facts for the report or raises. True if it returned."""
        self.send({"event": "begin", "step": step})
        faulthandler.dump_traceback_later(self.timeout, exit=True, file=2)
        try:
            facts = action()
        except BaseException as error:  # modules call sys.exit() on import, too
            traceback.print_exc()
            self.send({"event": "end", "step": step, "ok": False, "cause": cause_of(error)})
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.send({"event": "end", "step": step, "ok": True, "facts": facts})
        return True


def cause_of(error: BaseException) -> str:
    """The first cause of an exception, in one line."""
    chain = [error]
    while True:
        earlier = chain[-1].__cause__
        if earlier is None and not chain[-1].__suppress_context__:
            context = chain[-1].__context__
            # Other implicit contexts (a KeyError of a cache look-up) explain nothing.
            earlier = context if isinstance(context, (ImportError, OSError)) else None
        if earlier is None or earlier in chain:
            break
        chain.append(earlier)
    # sgl_kernel folds the loader's message into a page of text of its own.
    library = re.search(r"[^\s'\"(]+\.so[\w.]*: [^\n]+", "\n".join(map(str, chain)))
    if library:
        return one_line(library.group(0))
    root = chain[-1]
    lines = [line for line in str(root).splitlines() if line.strip()]
    # "what is missing:" says nothing without the line after it.
    shown = lines[:2] if lines and lines[0].rstrip().endswith(":") else lines[:1]
    text = ": ".join([type(root).__name__, *filter(None, [" ".join(shown)])])
    return one_line(text) + raised_at(root)


def raised_at(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.abspath(frame.filename) == os.path.abspath(__file__):
            break
        if not frame.filename.startswith("<frozen") and "/importlib/" not in frame.filename:
            return f" (in {'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno})"
    return ""


def probe_torch(report: Reporter) -> None:
    def load() -> dict[str, Any]:
        torch = importlib.import_module("torch")
        return {"version": str(torch.__version__), "path": str(Path(torch.__file__ or "").parent)}

    def cuda() -> dict[str, Any]:
        torch = importlib.import_module("torch")
        visible = bool(torch.cuda.is_available())
        return {
            "cuda": visible,
            "devices": int(torch.cuda.device_count()) if visible else 0,
            "built_for": torch.version.cuda or getattr(torch.version, "hip", None),
        }

    if report.attempt("torch", load):
        report.attempt("cuda", cuda)


def probe_imports(report: Reporter, modules: list[str]) -> None:
    def load(name: str) -> Callable[[], None]:
        def action() -> None:
            importlib.import_module(name)

        return action

    for name in modules:
        report.attempt(name, load(name))


def probe_plugin(report: Reporter, entry_point: str | None, site_dir: str | None) -> None:
    """Load what SGLang's plugin loader would load, and read the plugin's contract."""
    site = Path(site_dir) if site_dir is not None else None

    def load() -> None:
        assert entry_point is not None
        module_name, _, attribute = entry_point.partition(":")
        target: Any = importlib.import_module(module_name.strip())
        for part in filter(None, attribute.strip().split(".")):
            target = getattr(target, part)
        if not callable(target):
            raise TypeError(f"{entry_point} is no function, SGLang cannot call it")

    def touch_points() -> dict[str, Any]:
        workers = importlib.import_module(f"{PLUGIN_PACKAGE}.compat.workers")
        names = dict.fromkeys(point.name for point in workers.contract(site).points)
        # Where releases differ, one name has several places, of which one is in use.
        places = [workers.holding(name, site) for name in names] if site else []
        return {"modules": list(dict.fromkeys(place.module for place in places if place))}

    def contract() -> dict[str, Any]:
        workers = importlib.import_module(f"{PLUGIN_PACKAGE}.compat.workers")
        return {"broken": [str(sentence) for sentence in workers.check(site)]}

    def seams() -> dict[str, Any]:
        workers = importlib.import_module(f"{PLUGIN_PACKAGE}.compat.workers")
        return {
            "seams": {str(target): bool(there) for target, there in workers.seams(site).items()}
        }

    if entry_point is not None:
        report.attempt("entry point", load)
    if report.attempt("touch points", touch_points) and site is not None:
        report.attempt("contract", contract)
        report.attempt("seams", seams)


def probe_hooks(report: Reporter, seamed: bool) -> None:
    """Spawn a process as SGLang spawns its scheduler, and relay what it finds.

    `seamed`: the diffs of patches/ are applied, whose first seam to be called loads the plugin.
    """

    def settings() -> None:
        args = importlib.import_module(f"{PLUGIN_PACKAGE}.args")
        os.environ.update(args.build(threshold=4).to_env())

    if not report.attempt("settings", settings):
        return
    report.send({"event": "begin", "step": "spawn"})
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=scheduler_like, args=(sender, report.timeout, seamed))
    worker.start()
    sender.close()
    while True:
        try:
            event = receiver.recv()
        except EOFError:
            break
        report.send(event)
    worker.join()
    if worker.exitcode != 0:
        report.send({"event": "died", "cause": died_of(worker.exitcode)})


def died_of(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the spawned process died of {signal.Signals(-code).name}"
    return f"the spawned process ended with exit code {code}"


def scheduler_like(sender: Any, timeout: float, seamed: bool) -> None:
    """Runs in the spawned process: what SGLang's scheduler process does before it serves."""
    faulthandler.enable()
    report = Reporter(sender.send, timeout)
    errors: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            text = record.getMessage()
            errors.append(f"{text}: {cause_of(error)}" if error else text)
            print(self.format(record), file=sys.stderr)

    def import_scheduler() -> None:
        importlib.import_module("sglang.srt.managers.scheduler")

    def load_plugins() -> dict[str, Any]:
        if importlib.util.find_spec(ENTRY_POINT_GROUP) is None:
            return {"errors": []}  # our bootstrap has loaded the plugin at the import above
        # SGLang's loader logs a plugin's exception and goes on, so the log is the only trace.
        logging.getLogger(ENTRY_POINT_GROUP).addHandler(Collect(logging.ERROR))
        importlib.import_module(ENTRY_POINT_GROUP).load_plugins()
        return {"errors": errors}

    def call_seam() -> None:
        scheduler = "sglang.srt.managers.scheduler"
        importlib.import_module(SEAMS_MODULE).ensure_registered(scheduler)

    def verify_bound() -> dict[str, Any]:
        plugin = importlib.import_module(f"{PLUGIN_PACKAGE}.plugin")
        return {"unbound": [str(name) for name in plugin.verify_bound()]}

    loaded = report.attempt("scheduler", import_scheduler) and report.attempt("load", load_plugins)
    if loaded and (not seamed or report.attempt("seam", call_seam)):
        report.attempt("bound", verify_bound)


PROBES: dict[str, Callable[..., None]] = {
    "torch": probe_torch,
    "imports": probe_imports,
    "plugin": probe_plugin,
    "hooks": probe_hooks,
}


def run_as_probe(name: str, fd: str, timeout: str, arguments: str) -> None:
    faulthandler.enable()
    reports = os.fdopen(int(fd), "w", buffering=1, encoding="utf-8")

    def send(event: dict[str, Any]) -> None:
        reports.write(json.dumps(event) + "\n")

    PROBES[name](Reporter(send, float(timeout)), **json.loads(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads and exit handlers of what was imported must not turn a result into a hang.
    os._exit(0)


# --------------------------------------------------------------------------------------- checks


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    data = {"version": version, "executable": sys.executable, "prefix": sys.prefix}
    message = f"{version}, {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        message += f"; the plugin needs {needed} or newer, use the serving environment's (--python)"
        return Check("python", "FAIL", message, data=data)
    return Check("python", "OK", message, data=data)


def check_torch(timeout: float) -> Check:
    run = run_probe("torch", timeout)
    cause = run.cause("torch")
    if cause is not None:
        text = f"import torch: {cause}; SGLang needs it, reinstall the torch that SGLang pins"
        return Check("torch", "FAIL", text, output=run.output)
    facts = {**run.facts("torch"), **run.facts("cuda")}
    message = f"{facts['version']}, "
    cause = run.cause("cuda")
    if cause is not None:
        message += f"CUDA cannot be asked: {cause}"
        return Check("torch", "WARN", message, data=facts, output=run.output)
    if facts["cuda"]:
        message += f"CUDA visible, {facts['devices']} device(s)"
    else:
        message += "CUDA not visible (fine for a CPU engine)"
    return Check("torch", "OK", message, data=facts, output=run.output)


def has_plugin_system(sglang: Package) -> bool:
    return sglang.used is not None and (sglang.used / "srt" / "plugins" / "__init__.py").is_file()


def bootstrap_runs() -> bool:
    """Whether our .pth ran at the start of this interpreter, as it does in SGLang's processes."""
    return any(type(finder).__module__ == BOOTSTRAP_MODULE for finder in sys.meta_path)


@dataclass
class Seams:
    """Where the plugin hooks into this SGLang: with and without a seam of the diffs of patches/."""

    there: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def load_us(self) -> bool:
        """Whether they alone load the plugin into every process that matters."""
        return bool(self.there) and not self.missing

    @classmethod
    def of(cls, run: ProbeRun) -> Seams:
        found = run.facts("seams").get("seams", {})
        return cls([t for t, there in found.items() if there], [t for t in found if not found[t]])


def not_needed(check: Check, seams: Seams) -> Check:
    """A way to load the plugin that is closed is none that a patched SGLang needs."""
    if check.status != "FAIL" or not seams.load_us:
        return check
    text = "not in use, and not needed: this SGLang is patched to call the plugin"
    return Check(check.name, "OK", text, [check.message], check.data)


def check_seams(seams: Seams) -> Check:
    name = "seams"
    if seams.load_us:
        text = f"all {len(seams.there)} places are patched to call the plugin"
        return Check(name, "OK", text, seams.there)
    total = len(seams.there) + len(seams.missing)
    text = f"{len(seams.there)} of {total} places are patched to call the plugin, not"
    text += f" {seams.missing[0]}; apply_patches.py status, then apply or revert all"
    return Check(name, "WARN", text, seams.missing)


def check_plugin_system(sglang: Package) -> Check:
    name = "plugin system"
    if has_plugin_system(sglang):
        return Check(name, "OK", "this SGLang loads plugins")
    text = f"this SGLang has no plugin system ({FIRST_RELEASE_WITH_PLUGINS} and newer have)"
    if bootstrap_runs():
        return Check(name, "OK", f"{text}; {BOOTSTRAP_FILE} loads the plugin at its imports")
    if os.environ.get(BOOTSTRAP_SWITCH) == "0":
        text += f", and {BOOTSTRAP_SWITCH}=0 switches {BOOTSTRAP_FILE} off; unset it"
    else:
        text += (
            f", and {BOOTSTRAP_FILE} did not run: pip install {PLUGIN_DIST} (again, if it was"
            " installed before it had that file; a folder on PYTHONPATH is not enough)"
        )
    return Check(name, "FAIL", text)


def entry_points_of(
    dist: importlib.metadata.Distribution,
) -> Iterable[importlib.metadata.EntryPoint]:
    try:
        return dist.entry_points
    except Exception:  # entry_points.txt is damaged; what is raised differs by Python
        return []


def check_entry_point(plugin: Package) -> tuple[Check, str | None]:
    """The check, and the entry point's value when SGLang will load it."""
    name = "entry point"
    found: dict[str, list[str]] = {}
    for dist in plugin.dists:
        for entry in entry_points_of(dist):
            if entry.group == ENTRY_POINT_GROUP and entry.name == ENTRY_POINT_NAME:
                found.setdefault(entry.value, []).append(dist_version(dist))
    data = {"values": list(found), "SGLANG_PLUGINS": os.environ.get("SGLANG_PLUGINS")}
    if not found:
        text = (
            f"{ENTRY_POINT_NAME} is not registered in group {ENTRY_POINT_GROUP}, SGLang cannot"
            f" see the plugin; pip install {PLUGIN_DIST} (a folder on PYTHONPATH is not enough)"
        )
        return Check(name, "FAIL", text, data=data), None
    listed = os.environ.get("SGLANG_PLUGINS", "")
    if listed and ENTRY_POINT_NAME not in [part.strip() for part in listed.split(",")]:
        text = (
            f"SGLANG_PLUGINS={listed} hides {ENTRY_POINT_NAME}; unset it or add"
            f" {ENTRY_POINT_NAME} to it"
        )
        return Check(name, "FAIL", text, data=data), None
    value = next(iter(found))
    message = f"{ENTRY_POINT_NAME} = {value} in {ENTRY_POINT_GROUP}"
    if len(found) > 1:
        others = ", ".join(list(found)[1:])
        message += f"; another installed copy registers {others}, keep one"
        return Check(name, "WARN", message, data=data), value
    return Check(name, "OK", message, data=data), value


def check_entry_object(run: ProbeRun, value: str) -> Check:
    cause = run.cause("entry point")
    if cause is None:
        return Check("plugin import", "OK", f"{value} imports", output=run.output)
    text = f"import of {value}: {cause}; SGLang would log this and start without the plugin"
    return Check("plugin import", "FAIL", text, output=run.output)


def check_contract(run: ProbeRun, subject: str) -> Check:
    cause = run.cause("touch points") or run.cause("contract")
    if cause is not None:
        text = f"{PLUGIN_PACKAGE}.compat.workers: {cause}; reinstall {PLUGIN_DIST}"
        return Check("contract", "FAIL", text, output=run.output)
    broken = run.facts("contract")["broken"]
    data = {"subject": subject, "broken": broken}
    if not broken:
        text = f"{subject} has every touch point as the plugin expects it"
        return Check("contract", "OK", text, data=data, output=run.output)
    more = f" (and {len(broken) - 1} more, see -v)" if len(broken) > 1 else ""
    text = f"{subject} does not fit: {one_line(broken[0])}{more}"
    return Check("contract", "FAIL", text, list(broken), data, run.output)


@dataclass
class Imported:
    """How each module's import went: None if it worked, else its first cause."""

    causes: dict[str, str | None] = field(default_factory=dict)
    not_tried: list[str] = field(default_factory=list)
    output: str = ""


def import_each(modules: list[str], timeout: float) -> Imported:
    """Import modules one after another, in a fresh child whenever one spoiled the last."""
    done = Imported()
    pending = list(modules)
    while pending:
        run = run_probe("imports", timeout, modules=pending)
        done.output += run.output
        first_cause = None
        again = []
        for name in pending:
            cause = run.cause(name)
            reached = name in run.steps or name == run.begun
            stuck = run.timed_out and name == run.begun
            if reached and (cause is None or stuck or first_cause in (None, cause)):
                done.causes[name] = cause
                first_cause = first_cause or cause
            else:  # it may have failed only because of what failed before it
                again.append(name)
        if run.timed_out or len(again) == len(pending) or done.causes.get("sglang") is not None:
            done.not_tried = again
            break
        pending = again
    return done


def check_imports(modules: list[str], cuda: bool, timeout: float) -> list[Check]:
    """Import sglang itself, then every module that the plugin touches."""
    done = import_each(["sglang", *modules], timeout)
    cause = done.causes.pop("sglang", "the child process did not start")
    if cause is not None:
        text = f"import sglang: {cause}; reinstall SGLang"
        checks = [Check("sglang import", "FAIL", text, output=done.output)]
        return [*checks, Check("modules", "SKIP", "sglang does not import")]
    checks = [Check("sglang import", "OK", "import sglang works", output=done.output)]
    if not modules:
        return [*checks, Check("modules", "SKIP", "the plugin names no module of this SGLang")]
    if not any(done.causes.values()) and not done.not_tried:
        text = f"all {len(modules)} modules that the plugin touches import"
        return [*checks, Check("modules", "OK", text, modules, {"modules": modules})]
    by_cause: dict[str, list[str]] = {}
    for name, why in done.causes.items():
        if why is not None:
            by_cause.setdefault(why, []).append(name)
    for why, names in by_cause.items():
        some = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        data = {"modules": names, "cause": why}
        if no_cuda(why, cuda):
            text = f"{some}: cannot check on a box without CUDA libraries ({why})"
            checks.append(Check("modules", "WARN", text, names, data))
        else:
            checks.append(Check("modules", "FAIL", f"{some}: {why}", names, data))
    if done.not_tried:
        text = f"{len(done.not_tried)} more not tried after that"
        checks.append(Check("modules", "SKIP", text, done.not_tried))
    return checks


def no_cuda(cause: str, cuda_visible: bool) -> bool:
    return not cuda_visible and bool(NO_CUDA.search(cause))


def check_hooks(cuda: bool, timeout: float, seams: Seams) -> Check:
    name = "hooks"
    run = run_probe("hooks", timeout, seamed=seams.load_us)
    output = run.output
    cause = run.cause("settings")
    if cause is not None:
        text = f"{PLUGIN_PACKAGE}.args: {cause}; reinstall {PLUGIN_DIST}"
        return Check(name, "FAIL", text, output=output)
    cause = run.cause("scheduler")
    if cause is not None:
        if no_cuda(cause, cuda):
            text = f"cannot check on a box without CUDA libraries ({cause})"
            return Check(name, "WARN", text, output=output)
        text = f"import of SGLang's scheduler in a spawned process: {cause}"
        return Check(name, "FAIL", text, output=output)
    cause = run.cause("load")
    if cause is not None:
        return Check(name, "FAIL", f"load_plugins() in a spawned process: {cause}", output=output)
    errors = run.facts("load")["errors"]
    cause = run.cause("seam") if seams.load_us else None
    if cause is not None:
        return Check(name, "FAIL", f"first call of a seam: {cause}", errors, output=output)
    cause = run.cause("bound")
    unbound = run.facts("bound").get("unbound", [])
    data = {"unbound": unbound, "loader_errors": errors}
    if cause is None and not unbound and not errors:
        text = "all bound in a spawned, scheduler-like process"
        return Check(name, "OK", text, data=data, output=output)
    if cause is None and not unbound:
        text = f"all bound, but SGLang's plugin loader logged: {one_line(errors[0])}"
        return Check(name, "WARN", text, errors, data, output)
    if cause is not None:
        text = f"{PLUGIN_PACKAGE}.plugin.verify_bound(): {cause}"
    else:
        text = f"{len(unbound)} not bound in a spawned process: {unbound[0]}"
        text += f" (and {len(unbound) - 1} more, see -v)" if len(unbound) > 1 else ""
    if errors:
        text += f"; SGLang's plugin loader logged: {one_line(errors[0])}"
    return Check(name, "FAIL", text, [*unbound, *errors], data, output)


def environment_checks(timeout: float) -> Iterator[Check]:
    """All checks of this environment, each given out as soon as it is known."""
    yield check_python()
    sglang = find_package("sglang", "sglang")
    yield check_package(
        "sglang",
        sglang,
        "sglang",
        "install it, or name the serving environment's interpreter with --python",
    )
    torch = check_torch(timeout)
    yield torch
    cuda = bool(torch.data.get("cuda"))

    plugin = find_package(PLUGIN_PACKAGE, PLUGIN_DIST)
    yield check_package("plugin", plugin, PLUGIN_DIST, f"pip install {PLUGIN_DIST}")

    site_dir = str(sglang.used.parent) if sglang.importable and sglang.used else None
    value = None
    modules: list[str] = []
    seams = Seams()
    if plugin.importable:
        entry_point, value = check_entry_point(plugin)
        run = run_probe("plugin", timeout, entry_point=value, site_dir=site_dir)
        modules = run.facts("touch points").get("modules", [])
        seams = Seams.of(run)

    loads_plugins = False
    if sglang.importable:
        check = not_needed(check_plugin_system(sglang), seams)
        loads_plugins = check.status == "OK"
        yield check
    else:
        yield Check("plugin system", "SKIP", "there is no SGLang to look into")

    if plugin.importable:
        yield not_needed(entry_point, seams)
        if value is not None:
            yield check_entry_object(run, value)
        if seams.there:
            yield check_seams(seams)
        if site_dir is not None:
            yield check_contract(run, f"SGLang {code_version(Path(site_dir, 'sglang')) or ''}")
        else:
            yield Check("contract", "SKIP", "there is no SGLang to look into")
    else:
        for name in ("entry point", "contract"):
            yield Check(name, "SKIP", "the plugin is not importable")

    if sglang.importable:
        yield from check_imports(modules, cuda, timeout)
    else:
        yield Check("modules", "SKIP", "there is no SGLang to import")

    if not (sglang.importable and plugin.importable):
        yield Check("hooks", "SKIP", "needs both SGLang and the plugin")
    elif seams.load_us or (loads_plugins and value is not None):
        yield check_hooks(cuda, timeout, seams)
    else:
        yield Check("hooks", "SKIP", "SGLang would not load the plugin, see above")


def release_checks(paths: list[Path], timeout: float) -> Iterator[Check]:
    """The plugin's contract against SGLang releases that need not be installed."""
    for path in paths:
        with tempfile.TemporaryDirectory() as scratch:
            site_dir = path
            if path.is_file():
                site_dir = Path(scratch)
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(scratch, [n for n in wheel.namelist() if wanted(n)])
            run = run_probe("plugin", timeout, entry_point=None, site_dir=str(site_dir))
        yield check_contract(run, str(path))


def wanted(member: str) -> bool:
    return member.endswith(".py") or ".dist-info/" in member


def release_path(text: str) -> Path:
    """argparse type: a folder that holds sglang/, or a wheel of it."""
    path = Path(text)
    for folder in (path, path / "python"):  # site-packages, or a checkout of the repository
        if os.path.isfile(folder / "sglang" / "__init__.py"):
            return folder
    if os.path.isfile(path) and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            if "sglang/__init__.py" in wheel.namelist():
                return path
    raise argparse.ArgumentTypeError(
        f"{text} is neither a wheel (.whl) of SGLang nor a folder that holds sglang/;"
        " get one with: pip download --no-deps sglang==VERSION"
    )


# --------------------------------------------------------------------------------------- output


class Printer:
    """Plain lines, wrapped to the terminal if there is one, with a passing 'working' note."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.terminal = sys.stdout.isatty()
        self.width = shutil.get_terminal_size().columns if self.terminal else 10**6

    def show(self, check: Check) -> None:
        self.note("")
        label = f"{check.status:<5} {check.name:<14} "
        indent = " " * (len(label) if self.width >= 60 else 6)
        wrapped = textwrap.wrap(
            check.message,
            self.width,
            initial_indent=label,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,  # a path must stay whole to be copied
        )
        print("\n".join(wrapped))
        if self.verbose:
            for line in check.details:
                print(f"      - {line}")
            for line in check.output.splitlines():
                print(f"      | {line}")
        sys.stdout.flush()
        self.note("... checking")

    def note(self, text: str) -> None:
        if self.terminal:
            sys.stdout.write("\r\033[K" + text)
            sys.stdout.flush()

    def summary(self, checks: list[Check]) -> None:
        self.note("")
        counts = [f"{sum(c.status == s for c in checks)} {s}" for s in STATUSES]
        print(f"{', '.join(counts)}; exit code {exit_code(checks)}")


def as_json(checks: list[Check], verbose: bool) -> str:
    listed = []
    for check in checks:
        item = {
            "name": check.name,
            "status": check.status,
            "message": check.message,
            "details": check.details,
            "data": check.data,
        }
        if verbose:
            item["output"] = check.output
        listed.append(item)
    summary = {status: sum(c.status == status for c in checks) for status in STATUSES}
    report = {
        "schema": 1,
        "exit_code": exit_code(checks),
        "summary": summary,
        "checks": listed,
    }
    return json.dumps(report, indent=2)


# ----------------------------------------------------------------------------------------- main


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, e.g. 180")
    return seconds


def parse(argv: list[str]) -> argparse.Namespace:
    assert __doc__ is not None
    summary, _, rest = __doc__.partition("\n\n")
    parser = Parser(
        prog="verify_imports.py",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--python", metavar="PATH", help="check this interpreter's environment instead"
    )
    parser.add_argument(
        "--release-check",
        metavar="PATH",
        nargs="+",
        type=release_path,
        help="only compare the plugin's contract with these SGLang wheels or folders;"
        " imports nothing of SGLang",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_seconds,
        default=180.0,
        help="longest silence of a child process, e.g. during one import (default: 180)",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show all details and the children's output"
    )
    options = parser.parse_args(argv)
    if options.python is not None:
        options.python = usable_interpreter(parser, options.python)
    return options


def usable_interpreter(parser: Parser, text: str) -> str:
    """The path of a Python that can run this file; ends the program with a message if not."""
    found = shutil.which(text)
    if found is None:
        hint = f", did you mean {text}/bin/python?" if Path(text, "bin", "python").exists() else ""
        parser.error(f"--python {text}: no such executable{hint}")
    code = "import sys; print('python', sys.version_info >= (3, 8))"
    try:
        answer = subprocess.run(
            [found, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
        ).stdout.split()
    except (OSError, subprocess.TimeoutExpired) as error:
        parser.error(f"--python {text}: does not run: {one_line(str(error))}")
    if answer != [b"python", b"True"]:
        parser.error(f"--python {text}: is no Python of 3.8 or newer")
    return found


def without_python_option(argv: list[str]) -> list[str]:
    kept = list(argv)
    for position, word in enumerate(argv):
        if word == "--python":
            del kept[position : position + 2]
            break
        if word.startswith("--python="):
            del kept[position]
            break
    return kept


def stop_on(signum: int, _frame: Any) -> None:
    # As an exception, so that the children are stopped on the way out.
    raise SystemExit(128 + signum)


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.python is not None:
        rest = without_python_option(argv)
        command = [options.python, *python_flags(), os.path.abspath(__file__), *rest]
        os.execv(options.python, command)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(signum, stop_on)
    if options.release_check:
        found = release_checks(options.release_check, options.timeout)
    else:
        found = environment_checks(options.timeout)
    if options.json:
        checks = list(found)
        print(as_json(checks, options.verbose))
        return exit_code(checks)
    printer = Printer(options.verbose)
    checks = []
    for check in found:
        checks.append(check)
        printer.show(check)
    printer.summary(checks)
    return exit_code(checks)


def forget_script_folder() -> None:
    """The folder of this file is on sys.path only because it was run from there."""
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]


def run() -> int:
    if not os.path.isfile(globals().get("__file__", "")):  # piped into `python -`
        print("error: this script starts itself again, save it as a file first", file=sys.stderr)
        return EXIT_USAGE
    forget_script_folder()
    if sys.argv[1:2] == ["--probe"]:
        run_as_probe(*sys.argv[2:])
    # No child runs while lines are printed, so a closed pipe (| head) may simply end us.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any locale must do
    try:
        return main(sys.argv[1:])
    except Exception as error:
        if {"-v", "--verbose"} & set(sys.argv):
            traceback.print_exc()
        print(f"verify_imports.py itself failed: {cause_of(error)} (-v: where)", file=sys.stderr)
        return EXIT_BROKEN


if __name__ == "__main__":
    sys.exit(run())
