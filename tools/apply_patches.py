#!/usr/bin/env python3
"""Apply, inspect and take back the diffs of patches/<release>/ on an installed SGLang.

    python apply_patches.py status              what is installed, what is applied
    python apply_patches.py apply               all concerns of this release, or --only some
    python apply_patches.py revert              restore every byte
    python apply_patches.py verify              exit 0 only if all is applied, exact and revertible

One file, standard library only, Python >= 3.8: copy it and the `patches` folder to the machine and
run it with the interpreter that runs the server. Nothing of SGLang is imported or executed.

A file's state is decided by its sha256 alone, never by trying a hunk: each diff names the hash of
every file before and after it, and diffs that touch the same file build on each other in the order
of `series`. So there is no fuzz, and nothing is ever written over a change that is not ours.

All or nothing. New contents are computed in memory, staged beside their targets, and renamed over
them, so a hard-linked twin (uv's cache) keeps its content. A journal in the sglang folder lets the
next apply or revert finish or undo a run that was killed at any point.

RECORD is left alone. pip and uv use its paths to uninstall and never compare its hashes, while an
auditor who does compare them should see that these files are no longer the wheel's.

exit codes
  0  done, or nothing to do (status: the state could be read)
  1  verify only: not applied, not exact, or interrupted
  2  usage: unknown option or concern, or --only leaves out a diff that another one builds on
  3  malformed: a diff or series is damaged
  4  wrong base: a file is neither SGLang's original nor ours, or no diffs for this SGLang
  5  wrong root: no sglang here, or several and none chosen with --site
  6  busy: another run of this tool is changing this sglang
  7  not writable: permission, read-only file, link, full disk; nothing was changed
  8  stuck: an interrupted run can be neither finished nor undone without a person
130  Ctrl-C; files are as before or as after the command, never in between
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

EXIT_CODES = {
    "unverified": 1,
    "usage": 2,
    "malformed": 3,
    "wrong base": 4,
    "wrong root": 5,
    "busy": 6,
    "not writable": 7,
    "stuck": 8,
}
HEADER_FIELDS = ("Release", "What", "Why", "Upstream", "Retire")
JOURNAL_NAME = ".spec-ext-patch-journal"
JOURNAL_FORMAT = 1


class ToolError(Exception):
    """Ends the command. `kind` is a key of EXIT_CODES."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


# ------------------------------------------------------------------------------------ diffs


class Hunk(NamedTuple):
    old_start: int
    old: list[bytes]  # context and removed lines, line ends included
    new_start: int
    new: list[bytes]  # context and added lines

    def inverse(self) -> Hunk:
        return Hunk(self.new_start, self.new, self.old_start, self.old)


class FileDiff(NamedTuple):
    path: str  # "sglang/srt/...", with "/" whatever the platform
    before: str  # sha256 in hex
    after: str
    hunks: list[Hunk]


class Diff(NamedTuple):
    """One concern: the file patches/<release>/<name>.diff."""

    name: str
    header: dict[str, str]
    files: list[FileDiff]


def split_lines(data: bytes) -> list[bytes]:
    """Lines with their ends; only a newline ends a line (bytes.splitlines also splits at CR)."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def parse_diff(data: bytes, label: str) -> Diff:
    """Parse one diff with its header; `label` is the path to name in errors.

    Raises ToolError("malformed") with the line number for anything that is not exactly our format.
    """

    def bad(number: int, message: str) -> ToolError:
        return ToolError("malformed", f"malformed diff: {label}, line {number}: {message}")

    if b"\r\n" in data and data.count(b"\r\n") == data.count(b"\n"):
        raise bad(1, "every line ends with CR LF; copy the file again in binary mode")
    lines = split_lines(data)
    body = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    header, hashes = _parse_header(lines[:body], bad)
    if body == len(lines):
        raise bad(len(lines), "ends before the first '--- a/...' line")

    files: list[FileDiff] = []
    at = body
    while at < len(lines):
        path, at = _parse_file_names(lines, at, bad)
        if path in (done.path for done in files):
            raise bad(at, f"{path} appears twice")
        if set(hashes.get(path, {})) != {"Before", "After"}:
            raise bad(at, f"the header has no Before and After sha256 of {path}")
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _parse_hunk(lines, at, bad)
            hunks.append(hunk)
        if not hunks:
            raise bad(at + 1, f"no hunk for {path}")
        files.append(FileDiff(path, hashes[path]["Before"], hashes[path]["After"], hunks))
    extra = sorted(set(hashes) - {done.path for done in files})
    if extra:
        raise bad(len(lines), f"ends without the hunks of {listed(extra)}")
    return Diff(os.path.splitext(os.path.basename(label))[0], header, files)


def _parse_header(
    lines: list[bytes], bad: Callable[[int, str], ToolError]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    fields: list[tuple[int, str, str]] = []
    for number, raw in enumerate(lines, 1):
        try:
            line = raw.decode("utf-8").rstrip("\n")
        except UnicodeDecodeError:
            raise bad(number, "not UTF-8") from None
        match = re.match(r"([A-Z][A-Za-z-]*): (.*)$", line)
        if match:
            fields.append((number, match.group(1), match.group(2).strip()))
        elif line.startswith(" ") and fields:
            first, key, value = fields[-1]
            fields[-1] = (first, key, f"{value} {line.strip()}")
        elif line.strip():
            raise bad(number, f"expected 'Field: text' before the first '--- ' line, got {line!r}")
    header: dict[str, str] = {}
    hashes: dict[str, dict[str, str]] = {}
    for number, key, value in fields:
        if key in ("Before", "After"):
            match = re.match(r"sha256:([0-9a-f]{64}) (\S+)$", value)
            if not match:
                raise bad(number, f"expected '{key}: sha256:<64 hex digits> <path>'")
            hashes.setdefault(match.group(2), {})[key] = match.group(1)
        else:
            header[key] = value
    missing = [key for key in HEADER_FIELDS if not header.get(key)]
    if missing:
        raise bad(1, f"the header lacks {listed(missing)}")
    for path, pair in hashes.items():
        if pair.get("Before") == pair.get("After"):
            raise bad(1, f"Before and After of {path} are the same")
    return header, hashes


def _parse_file_names(
    lines: list[bytes], at: int, bad: Callable[[int, str], ToolError]
) -> tuple[str, int]:
    paths = []
    for offset, (mark, prefix) in enumerate(((b"--- ", "a/"), (b"+++ ", "b/"))):
        line = lines[at + offset] if at + offset < len(lines) else b""
        name = line[len(mark) :].decode("utf-8", "replace").rstrip("\n")
        if not line.startswith(mark) or not name.startswith(prefix):
            raise bad(at + offset + 1, f"expected '{mark.decode()}{prefix}<path>'")
        paths.append(name[len(prefix) :])
    old, new = paths
    parts = old.split("/")
    if old != new:
        raise bad(at + 2, "creates, deletes or renames a file; only changes are supported")
    if parts[0] != "sglang" or len(parts) < 2 or {"", ".", ".."} & set(parts) or "\\" in old:
        raise bad(at + 1, f"the path must be inside sglang/, got {old!r}")
    return old, at + 2


def _parse_hunk(
    lines: list[bytes], at: int, bad: Callable[[int, str], ToolError]
) -> tuple[Hunk, int]:
    match = re.match(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", lines[at])
    if not match:
        raise bad(at + 1, "expected '@@ -line,count +line,count @@'")
    old_start, old_count, new_start, new_count = (
        int(group) if group is not None else 1 for group in match.groups()
    )
    old: list[bytes] = []
    new: list[bytes] = []
    head = at
    at += 1
    while at < len(lines) and (len(old) < old_count or len(new) < new_count):
        mark, text = lines[at][:1], lines[at][1:]
        sides = {b" ": (old, new), b"-": (old,), b"+": (new,)}.get(mark)
        if sides is None:
            hint = " (a blank context line lost its leading space)" if mark == b"\n" else ""
            raise bad(at + 1, f"expected a line that starts with ' ', '-' or '+'{hint}")
        at += 1
        if at < len(lines) and lines[at].startswith(b"\\ "):
            text = text[:-1]
            at += 1
        for side in sides:
            side.append(text)
    if (len(old), len(new)) != (old_count, new_count):
        raise bad(head + 1, f"the hunk has {len(old)} old and {len(new)} new lines, not as it says")
    if at < len(lines) and not lines[at].startswith((b"@@", b"--- ")):
        raise bad(at + 1, "a line after the end of the hunk")
    return Hunk(old_start, old, new_start, new), at


def patched(data: bytes, hunks: list[Hunk]) -> bytes:
    """`data` with the hunks applied at exactly their lines. Raises ValueError where one misfits."""
    lines = split_lines(data)
    out: list[bytes] = []
    cursor = 0
    for hunk in hunks:
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        end = start + len(hunk.old)
        if start < cursor or lines[start:end] != hunk.old:
            raise ValueError(f"the hunk at line {hunk.old_start} does not fit")
        out += lines[cursor:start] + hunk.new
        cursor = end
    return b"".join(out + lines[cursor:])


class Link(NamedTuple):
    """One diff's part in the chain of contents that a file goes through."""

    concern: str
    diff: FileDiff


class PatchSet(NamedTuple):
    """The folder of one release: its diffs in the order of `series`."""

    release: str
    folder: str
    diffs: list[Diff]
    chains: dict[str, list[Link]]  # path -> the diffs that change it, in order

    def names(self) -> list[str]:
        return [diff.name for diff in self.diffs]

    def position(self, path: str, concern: str) -> int:
        """1 for the first diff of the file's chain: the content's level once it is applied."""
        return [link.concern for link in self.chains[path]].index(concern) + 1

    def level_of(self, path: str, digest: str | None) -> int | None:
        """How many diffs of the chain a content has, 0 if pristine; None if it is not ours."""
        chain = self.chains[path]
        known = [chain[0].diff.before] + [link.diff.after for link in chain]
        return known.index(digest) if digest in known else None

    def transform(self, path: str, data: bytes, level: int, target: int) -> bytes:
        """The content at `target` diffs, from `data` at `level`; every step checked by hash."""
        while level != target:
            forward = target > level
            link = self.chains[path][level if forward else level - 1]
            hunks = link.diff.hunks if forward else [hunk.inverse() for hunk in link.diff.hunks]
            where = f"{os.path.join(self.folder, link.concern)}.diff"
            try:
                data = patched(data, hunks)
            except ValueError as problem:
                message = f"{where}: {problem} the {path} whose hash its header names"
                raise ToolError("malformed", f"malformed diff: {message}") from None
            if sha256(data) != (link.diff.after if forward else link.diff.before):
                message = f"{where}: its hunks on {path} do not give the hash its header names"
                raise ToolError("malformed", f"malformed diff: {message}")
            level += 1 if forward else -1
        return data


def read_patch_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as problem:
        message = f"cannot read {path}: {problem.strerror}; copy the whole patches folder"
        raise ToolError("malformed", f"malformed patch set: {message}") from None


def load_patch_set(folder: str) -> PatchSet:
    """Read patches/<release>/. Raises ToolError("malformed") if any part of it is damaged."""
    release = os.path.basename(os.path.abspath(folder))
    series = os.path.join(folder, "series")
    diffs: list[Diff] = []
    chains: dict[str, list[Link]] = {}
    for line in read_patch_file(series).decode("utf-8", "replace").splitlines():
        entry = line.split("#")[0].strip()
        if not entry:
            continue
        if "/" in entry or not entry.endswith(".diff"):
            raise ToolError("malformed", f"malformed patch set: {series}: not a diff: {entry!r}")
        path = os.path.join(folder, entry)
        diff = parse_diff(read_patch_file(path), path)
        if diff.name in (other.name for other in diffs):
            raise ToolError("malformed", f"malformed patch set: {series}: {entry} appears twice")
        if diff.header["Release"] != release:
            message = f"{path} is for release {diff.header['Release']}, not {release}"
            raise ToolError("malformed", f"malformed patch set: {message}")
        diffs.append(diff)
        for change in diff.files:
            chain = chains.setdefault(change.path, [])
            if chain and chain[-1].diff.after != change.before:
                message = f"{path} does not start from what {chain[-1].concern} makes of"
                raise ToolError("malformed", f"malformed patch set: {message} {change.path}")
            chain.append(Link(diff.name, change))
    if not diffs:
        raise ToolError("malformed", f"malformed patch set: {series} names no diff")
    return PatchSet(release, folder, diffs, chains)


def find_releases(option: str | None) -> dict[str, str]:
    """Release -> folder, from --patches or from `patches` beside this file or one level up."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = [option] if option else [os.path.join(here, "..", "patches"), f"{here}/patches"]
    for place in places:
        folders = sorted(glob.glob(os.path.join(glob.escape(place), "[0-9]*", "series")))
        if folders:
            paths = [os.path.normpath(os.path.dirname(series)) for series in folders]
            return {os.path.basename(path): path for path in paths}
    message = f"no <release>/series under {' or '.join(map(os.path.normpath, places))}"
    raise ToolError("usage", f"{message}; give the patches folder with --patches")


# ------------------------------------------------------------------------------------ sites


class Site(NamedTuple):
    """One sglang on this machine."""

    package: str  # the folder that holds sglang's __init__.py, links resolved
    shown: str  # as it was found
    how: str
    version: str | None

    def resolve(self, path: str) -> str:
        """The file for a diff's path "sglang/srt/..."."""
        return os.path.join(self.package, *path.split("/")[1:])


def is_package(folder: str) -> bool:
    init = os.path.join(folder, "__init__.py")
    return os.path.isfile(init) and os.path.isdir(os.path.join(folder, "srt"))


def package_version(package: str) -> str | None:
    """What the sglang folder says of itself; None for a checkout without a generated version."""
    for name in ("_version.py", "version.py"):
        try:
            with open(os.path.join(package, name), encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            continue
        match = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", text, re.MULTILINE)
        if match:
            return match.group(1)
    infos = glob.glob(os.path.join(glob.escape(os.path.dirname(package)), "sglang-*.dist-info"))
    if len(infos) == 1:
        return os.path.basename(infos[0])[len("sglang-") : -len(".dist-info")]
    return None


def make_site(folder: str, how: str) -> Site:
    package = os.path.realpath(folder)
    return Site(package, os.path.abspath(folder), how, package_version(package))


def sites_under(path: str) -> list[Site]:
    """Every sglang that `path` can mean: the package, a folder of packages, a checkout, an env."""
    root = glob.escape(os.path.abspath(path))
    patterns = ("", "sglang", "python/sglang", "lib*/python3*/*-packages/sglang")
    found: dict[str, Site] = {}
    for pattern in patterns:
        for folder in sorted(glob.glob(os.path.join(root, *pattern.split("/")))):
            if is_package(folder):
                site = make_site(folder, "--site")
                found.setdefault(site.package, site)
    return list(found.values())


def sites_in_use() -> list[Site]:
    """What `import sglang` gives in this interpreter, first, then what else could shadow it."""
    found: dict[str, Site] = {}

    def add(folder: str, how: str) -> None:
        if is_package(folder):
            site = make_site(folder, how)
            found.setdefault(site.package, site)

    # A finder of an editable install is foreign code and may fail in any way; what it would have
    # found is then looked for on sys.path like the rest.
    with contextlib.suppress(Exception):
        spec = importlib.util.find_spec("sglang")
        if spec is not None and spec.origin:
            add(os.path.dirname(spec.origin), f"imported by {sys.executable}")
    for entry in sys.path:
        add(os.path.join(entry or os.curdir, "sglang"), "on sys.path, shadowed")
    add(os.path.join(os.curdir, "sglang"), "imported by `python -m sglang...` in this folder")
    return list(found.values())


def hinted_sites() -> list[Site]:
    """Where else a server's environment may be; only to name it in an error, never to act on."""
    prefixes = [os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")]
    for program in ("sglang", "python", "python3"):
        found = shutil.which(program)
        if found:
            prefixes.append(os.path.dirname(os.path.dirname(found)))
    sites = {site.package: site for prefix in prefixes if prefix for site in sites_under(prefix)}
    return list(sites.values())


def choose_site(option: str | None) -> Site:
    sites = sites_under(option) if option else sites_in_use()
    if len(sites) == 1:
        return sites[0]
    choices = sites or ([] if option else hinted_sites())
    lines = [f"\n  --site {site.shown}  ({site.version or '?'}, {site.how})" for site in choices]
    if sites:
        raise ToolError("wrong root", f"several sglang; choose one with:{''.join(lines)}")
    if option:
        message = f"wrong root: no sglang package in {option}; --site takes a site-packages folder,"
        message += " an environment, a git checkout or the sglang folder itself"
        raise ToolError("wrong root", message)
    message = f"wrong root: {sys.executable} has no sglang; run this file with the interpreter that"
    message += " runs the server, or give --site DIR" + "".join(lines)
    raise ToolError("wrong root", message)


# ------------------------------------------------------------------------------------ states


class FileState(NamedTuple):
    path: str
    state: str  # pristine, applied, partly applied, changed by others, not this release
    level: int | None  # diffs of the chain that it has; None in the last two states
    data: bytes
    detail: str


def survey(site: Site, patches: PatchSet, releases: dict[str, str]) -> dict[str, FileState]:
    states = {}
    for path, chain in patches.chains.items():
        try:
            with open(site.resolve(path), "rb") as file:
                data: bytes | None = file.read()
        except (FileNotFoundError, NotADirectoryError):
            data = None
        except OSError as problem:
            message = f"cannot read {site.resolve(path)}: {problem.strerror}"
            raise ToolError("not writable", message) from None
        level = patches.level_of(path, None if data is None else sha256(data))
        if level is None:
            state, detail = _foreign_state(site, patches, path, data, releases)
        else:
            has = [link.concern for link in chain[:level]]
            state = {0: "pristine", len(chain): "applied"}.get(level, "partly applied")
            detail = f"has {listed(has)}" if state == "partly applied" else ""
        states[path] = FileState(path, state, level, data or b"", detail)
    return states


def _foreign_state(
    site: Site, patches: PatchSet, path: str, data: bytes | None, releases: dict[str, str]
) -> tuple[str, str]:
    detail = "file is missing" if data is None else f"sha256 {sha256(data)[:12]}..."
    for release, folder in releases.items():
        if data is None or release == patches.release:
            continue
        with contextlib.suppress(ToolError):
            other = load_patch_set(folder)
            if path in other.chains and other.level_of(path, sha256(data)) is not None:
                return "not this release", f"is the file of SGLang {release}"
    if site.version not in (None, patches.release):
        return "not this release", f"SGLang says it is {site.version}; {detail}"
    expected = patches.chains[path][0].diff.before
    return "changed by others", f"{detail}, original {expected[:12]}..."


def concern_state(diff: Diff, patches: PatchSet, states: dict[str, FileState]) -> str:
    has = set()
    for change in diff.files:
        state = states[change.path]
        if state.level is None:
            return state.state
        has.add(state.level >= patches.position(change.path, diff.name))
    return "partly applied" if len(has) == 2 else ("applied" if has.pop() else "pristine")


def choose_patches(site: Site, releases: dict[str, str], option: str | None) -> PatchSet:
    """The release's folder: as told, else by SGLang's version, else the one whose hashes fit."""
    wanted = option or site.version
    if wanted in releases:
        return load_patch_set(releases[wanted])
    if option:
        raise ToolError("usage", f"no patches for {option}; there are: {listed(list(releases))}")
    fitting = []
    for folder in releases.values():
        patches = load_patch_set(folder)
        states = survey(site, patches, {})
        if all(state.level is not None for state in states.values()):
            fitting.append(patches)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        fits = listed([patches.release for patches in fitting])
        raise ToolError("usage", f"the files fit several releases; choose with --release: {fits}")
    message = f"wrong base: no patches for SGLang {site.version or 'of unknown version'} in"
    message += f" {site.shown}; there are patches for: {listed(list(releases))}"
    raise ToolError("wrong base", message)


# ------------------------------------------------------------------------------------ plan


class Change(NamedTuple):
    path: str  # as in the diff
    old: bytes
    new: bytes


def targets(
    action: str, patches: PatchSet, names: list[str], states: dict[str, FileState]
) -> dict[str, int]:
    """Path -> how many diffs of its chain it shall have. Needs every level to be known."""
    wanted: dict[str, int] = {}
    forward = action == "apply"
    for diff in patches.diffs if forward else reversed(patches.diffs):
        if diff.name not in names:
            continue
        for change in diff.files:
            level = states[change.path].level
            assert level is not None
            position = patches.position(change.path, diff.name)
            chain = [link.concern for link in patches.chains[change.path]]
            between = chain[level : position - 1] if forward else chain[position:level]
            missing = [name for name in between if name not in names]
            if missing:
                order = "builds on" if forward else "is built on by"
                message = f"{diff.name} {order} {listed(missing)} in {change.path};"
                both = ",".join(name for name in patches.names() if name in {*names, *missing})
                raise ToolError("usage", f"{message} use --only {both}")
            if forward:
                wanted[change.path] = max(wanted.get(change.path, level), position)
            else:
                wanted[change.path] = min(wanted.get(change.path, level), position - 1)
    return wanted


def make_plan(
    action: str, site: Site, patches: PatchSet, names: list[str], states: dict[str, FileState]
) -> list[Change]:
    """Everything that would be written, in memory. Raises before anything is touched."""
    selected = {c.path: None for diff in patches.diffs if diff.name in names for c in diff.files}
    foreign = [states[path] for path in selected if states[path].level is None]
    if foreign:
        lines = [f"\n  {state.path}: {state.state} ({state.detail})" for state in foreign]
        message = f"wrong base: not SGLang {patches.release}'s original and not ours:"
        message += "".join(lines) + "\nNothing was changed. Undo the other change, or restore with:"
        message += f"\n  pip install --force-reinstall --no-deps sglang=={patches.release}"
        raise ToolError("wrong base", message)
    plan = []
    for path, target in targets(action, patches, names, states).items():
        state = states[path]
        assert state.level is not None
        if target != state.level:
            new = patches.transform(path, state.data, state.level, target)
            plan.append(Change(path, state.data, new))
    problems = [problem for change in plan for problem in obstacles(site.resolve(change.path))]
    if problems:
        message = "not writable; nothing was changed:" + "".join(f"\n  {p}" for p in problems)
        raise ToolError("not writable", message)
    return plan


def obstacles(path: str) -> list[str]:
    """Why this file must not or cannot be replaced, as far as can be told without writing."""
    real = os.path.realpath(path)
    if real != path:
        # Links inside a package come from installers that share one copy among environments.
        return [f"{path} leads through a link to {real}; reinstall sglang as copies"]
    info = os.lstat(path)
    if not stat.S_ISREG(info.st_mode):
        return [f"{path} is not a plain file"]
    # Looked at by hand because root may write what the mode forbids, and the mode says "do not".
    if not info.st_mode & 0o222:
        mode = stat.S_IMODE(info.st_mode)
        return [f"{path} is read-only (mode {mode:04o}); chmod u+w it if it may be changed"]
    folder = os.path.dirname(path)
    blocked = [p for p in (path, folder) if not os.access(p, os.W_OK)]
    return [f"{p} cannot be written by this user, or lies on a read-only disk" for p in blocked]


# ------------------------------------------------------------------------------------ bytecode


def bytecode_of(path: str) -> list[str]:
    """The .pyc files of a source, of any interpreter and optimisation level."""
    folder, name = os.path.split(path)
    stem = os.path.splitext(name)[0]
    folders = {os.path.join(folder, "__pycache__")}
    if sys.pycache_prefix:
        folders.add(os.path.dirname(importlib.util.cache_from_source(path)))
    found = []
    for cache in sorted(folders):
        found += sorted(glob.glob(os.path.join(glob.escape(cache), f"{glob.escape(stem)}.*.pyc")))
    return found


def is_stale(bytecode: str, source: bytes) -> bool:
    """True if Python would run this .pyc although it was made from another source.

    Only the "unchecked hash" kind can do that, which some images are compiled to.
    """
    with open(bytecode, "rb") as file:
        head = file.read(16)
    if len(head) < 16 or int.from_bytes(head[4:8], "little") != 0b01:
        return False
    same = head[:4] == importlib.util.MAGIC_NUMBER
    return not same or head[8:16] != importlib.util.source_hash(source)


# ------------------------------------------------------------------------------------ writing


def fsync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)


def stage(path: str, data: bytes, like: os.stat_result, keep_time: bool) -> None:
    """Create `path` with the owner and mode of `like`, safe on disk before this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
            # In an environment shared by a group the new file is simply ours, as an editor's is.
            with contextlib.suppress(PermissionError):
                os.fchown(fd, like.st_uid, like.st_gid)
        os.fchmod(fd, stat.S_IMODE(like.st_mode))
        write_all(fd, data)
        if keep_time:
            os.utime(fd, ns=(like.st_atime_ns, like.st_mtime_ns))
    finally:
        os.close(fd)


def digest_of(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return sha256(file.read())
    except FileNotFoundError:
        return None


def remove_if_there(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C, a dropped SSH session or a plain kill wait until the files are whole again."""
    held = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


class Entry(NamedTuple):
    """One file of a run, as the journal keeps it. Contents lie beside it until the run is over."""

    path: str
    before: str
    after: str
    new: str  # staged new content
    old: str  # copy of the old content


class Journal:
    """Makes a run on several files all or nothing, also across kill -9.

    The file is the lock (held while a run is alive) and the record (what the run is about). It is
    written whole before anything is staged, everything is staged before the first rename, and it
    goes last. So a dead run whose files are all untouched is undone by removing what it staged, and
    one that has renamed any file can be finished from what it staged.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.path = os.path.join(site.package, JOURNAL_NAME)
        self.fd = -1

    def pending(self) -> str | None:
        """What a journal that lies there says, without touching it; None if there is none."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as problem:
            return f"a run of another user ({problem.strerror}: {self.path})"
        try:
            record = self._read(fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"a run in progress: {describe(record)}"
            return f"an interrupted run: {describe(record)}"
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[dict[str, Any]]:
        """Hold the lock; yields the record of a dead run, empty if there is none."""
        while True:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = describe(self._read(self.fd))
                os.close(self.fd)
                raise ToolError("busy", f"another run is patching this sglang: {text}") from None
            except OSError as problem:
                os.close(self.fd)
                remove_if_there(self.path)
                message = f"not writable: cannot lock {self.path}: {problem.strerror}"
                raise ToolError("not writable", message) from None
            # The run that held it may have removed it between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self.fd), os.stat(self.path)):
                    break
            os.close(self.fd)
        try:
            yield self._read(self.fd)
        finally:
            if not self._raw(self.fd).endswith(b"\n"):
                remove_if_there(self.path)
            os.close(self.fd)

    def _raw(self, fd: int) -> bytes:
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def _read(self, fd: int) -> dict[str, Any]:
        raw = self._raw(fd)
        if not raw.endswith(b"\n"):
            return {}  # killed while writing it, so nothing was staged
        try:
            record = json.loads(raw)
            if record["format"] == JOURNAL_FORMAT:
                return dict(record)
            problem = "written by another version of this tool"
        except (ValueError, KeyError, TypeError):
            problem = "unreadable"
        raise ToolError("stuck", f"stuck: {self.path} is {problem}; {self._by_hand()}")

    def _by_hand(self) -> str:
        return f"reinstall sglang, then remove {self.path} and .*.spec-ext-* files in its folders"

    def _entries(self, record: dict[str, Any]) -> list[Entry]:
        entries = []
        for path, before, after in record["files"]:
            real = self.site.resolve(path)
            folder, name = os.path.split(real)
            staged = os.path.join(folder, f".{name}.spec-ext-{record['run']}")
            entries.append(Entry(real, before, after, f"{staged}.new", f"{staged}.old"))
        return entries

    def run(self, action: str, concerns: list[str], plan: list[Change]) -> None:
        """Write the plan. On any failure the old bytes are back when this raises."""
        record = {
            "format": JOURNAL_FORMAT,
            "action": action,
            "concerns": concerns,
            "run": os.urandom(4).hex(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "files": [[change.path, sha256(change.old), sha256(change.new)] for change in plan],
        }
        entries = self._entries(record)
        try:
            os.ftruncate(self.fd, 0)
            write_all(self.fd, json.dumps(record).encode() + b"\n")
            fsync_folder(self.site.package)
            for entry, change in zip(entries, plan):  # noqa: B905 (strict= needs Python 3.10)
                like = os.stat(entry.path)
                if digest_of(entry.path) != entry.before:
                    raise ToolError("wrong base", f"wrong base: {entry.path} was just changed")
                stage(entry.old, change.old, like, keep_time=True)
                stage(entry.new, change.new, like, keep_time=False)
            for folder in {os.path.dirname(entry.path) for entry in entries}:
                fsync_folder(folder)
            self._put_new(entries)
        except (OSError, ToolError) as problem:
            try:
                self._put_old(entries)
            except OSError as second:
                message = f"stuck: {reason(problem)}; undoing it failed too: {reason(second)};"
                message += " some files may be new. Clear the cause, then run this again"
                raise ToolError("stuck", message) from None
            if isinstance(problem, ToolError):
                raise
            message = f"not writable: {reason(problem)}; nothing was changed"
            raise ToolError("not writable", message) from None
        try:
            self._forget(entries)
        except OSError as problem:
            message = f"not writable: {action} is complete, but cleaning up failed:"
            message += f" {reason(problem)}; run {action} again"
            raise ToolError("not writable", message) from None

    def recover(self, record: dict[str, Any]) -> str:
        """Finish or undo a dead run; returns which, in words."""
        entries = self._entries(record)
        digests = {entry: digest_of(entry.path) for entry in entries}
        renamed = [entry for entry in entries if digests[entry] == entry.after]
        waiting = [entry for entry in entries if digests[entry] == entry.before]
        try:
            if not renamed:
                self._put_old(entries)  # removes what was staged; whatever is there now stays
                return f"undid {describe(record)}"
            if len(renamed) + len(waiting) == len(entries):
                if all(digest_of(entry.new) == entry.after for entry in waiting):
                    self._put_new(entries)
                    self._forget(entries)
                    return f"finished {describe(record)}"
                if all(digest_of(entry.old) == entry.before for entry in renamed):
                    self._put_old(entries)
                    return f"undid {describe(record)}"
        except OSError as problem:
            message = f"not writable: cannot finish or undo {describe(record)}: {reason(problem)}"
            raise ToolError("not writable", message) from None
        touched = [entry.path for entry in entries if entry not in renamed]
        message = f"stuck: {describe(record)} was interrupted, and since then these files or their"
        message += f" staged copies were changed: {listed(touched)}; {self._by_hand()}"
        raise ToolError("stuck", message)

    def _put_new(self, entries: list[Entry]) -> None:
        for entry in entries:
            if os.path.lexists(entry.new):
                os.replace(entry.new, entry.path)
        for folder in {os.path.dirname(entry.path) for entry in entries}:
            fsync_folder(folder)
        # After the renames: a server that starts in between compiles the old or the new source,
        # but can no longer leave a .pyc of the old one that passes for the new one's.
        for entry in entries:
            for bytecode in bytecode_of(entry.path):
                remove_if_there(bytecode)

    def _put_old(self, entries: list[Entry]) -> None:
        for entry in entries:
            if digest_of(entry.path) == entry.after:
                os.replace(entry.old, entry.path)
        self._forget(entries)

    def _forget(self, entries: list[Entry]) -> None:
        for entry in entries:
            remove_if_there(entry.new)
            remove_if_there(entry.old)
        for folder in {os.path.dirname(entry.path) for entry in entries}:
            fsync_folder(folder)
        os.ftruncate(self.fd, 0)  # an empty journal is no run; locked() removes the file


def describe(record: dict[str, Any]) -> str:
    if not record:
        return "one that had changed nothing"
    what = f"{record['action']} of {listed(record['concerns'])}"
    return f"{what} ({len(record['files'])} files, pid {record['pid']} on {record['host']})"


def reason(problem: Exception) -> str:
    if not isinstance(problem, OSError):
        return str(problem)
    text = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the disk is read-only",
        errno.EBUSY: "the file is a mount point (mounted into a container?)",
    }.get(problem.errno or 0, problem.strerror or str(problem))
    return f"{text}: {problem.filename}" if problem.filename else text


# ------------------------------------------------------------------------------------ commands


class Session:
    """One command: what was chosen, and the report that --json prints."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lines: list[str] = []
        self.report: dict[str, Any] = {"command": args.command, "exit": 0}

    def say(self, line: str) -> None:
        self.lines.append(line)

    def choose(self) -> None:
        self.releases = find_releases(self.args.patches)
        self.site = choose_site(self.args.site)
        self.report["site"] = self.site._asdict()
        self.say(f"sglang {self.site.version or '?'} in {self.site.shown} ({self.site.how})")
        if self.site.package != self.site.shown:
            self.say(f"  links lead to {self.site.package}: all who share it share the patches")
        self.patches = choose_patches(self.site, self.releases, self.args.release)
        self.report["release"] = self.patches.release
        self.names = self._selected()
        self.journal = Journal(self.site)
        self.report["pending"] = self.journal.pending()

    def _selected(self) -> list[str]:
        known = self.patches.names()
        asked = [name for part in self.args.only for name in part.split(",") if name]
        unknown = [name for name in asked if name not in known]
        if unknown:
            message = f"--only: no concern {listed(unknown)} for {self.patches.release};"
            raise ToolError("usage", f"{message} there are: {listed(known)}")
        if self.args.only and not asked:
            raise ToolError("usage", f"--only names no concern; there are: {listed(known)}")
        return [name for name in known if name in asked] if asked else known

    def survey(self) -> dict[str, FileState]:
        states = survey(self.site, self.patches, self.releases)
        chosen = [diff for diff in self.patches.diffs if diff.name in self.names]
        self.report["concerns"] = {d.name: concern_state(d, self.patches, states) for d in chosen}
        self.report["files"] = {
            change.path: {"state": states[change.path].state, "detail": states[change.path].detail}
            for diff in chosen
            for change in diff.files
        }
        return states

    def status(self) -> None:
        self.survey()
        self.say(f"patches for {self.patches.release}, in order:")
        for diff in self.patches.diffs:
            if diff.name in self.names:
                self.say(f"  {diff.name}: {self.report['concerns'][diff.name]}")
                self.say(f"    {diff.header['What']}")
                for change in diff.files:
                    file = self.report["files"][change.path]
                    detail = f" ({file['detail']})" if file["detail"] else ""
                    self.say(f"    {change.path}: {file['state']}{detail}")
        if self.report["pending"]:
            self.say(f"{self.report['pending']}; the next apply or revert settles it")

    def verify(self) -> None:
        states = self.survey()
        problems = [f"{self.report['pending']}"] if self.report["pending"] else []
        for name, state in self.report["concerns"].items():
            if state != "applied":
                problems.append(f"{name} is {state}")
        for path in self.report["files"]:
            state = states[path]
            if state.level is None:
                problems.append(f"{path} is {state.state} ({state.detail})")
                continue
            self.patches.transform(path, state.data, state.level, 0)
            for bytecode in bytecode_of(self.site.resolve(path)):
                if is_stale(bytecode, state.data):
                    problems.append(f"{bytecode} hides the source; remove it")
        self.report["problems"] = problems
        if problems:
            lines = "".join(f"\n  {problem}" for problem in problems)
            raise ToolError("unverified", f"not verified:{lines}")
        self.say(f"verified: {listed(self.names)} applied, exact and revertible")

    def change(self) -> None:
        action = self.args.command
        self.report["changed"] = []
        if self.args.dry_run:
            if self.report["pending"]:
                self.say(f"{self.report['pending']}; the next {action} settles it before its own")
                return
            plan = make_plan(action, self.site, self.patches, self.names, self.survey())
            self._report_plan(plan, "would change")
            return
        states = self.survey()
        if not self.report["pending"] and not make_plan(
            action, self.site, self.patches, self.names, states
        ):
            self._report_plan([], "")  # without the lock: a no-op works on a read-only disk too
            return
        try:
            with signals_held(), self.journal.locked() as dead:
                if dead:
                    self.report["recovered"] = self.journal.recover(dead)
                    self.say(f"interrupted run: {self.report['recovered']}")
                states = self.survey()
                plan = make_plan(action, self.site, self.patches, self.names, states)
                if plan:
                    self.journal.run(action, self.names, plan)
        except OSError as problem:
            message = f"not writable: {reason(problem)}; nothing was changed"
            raise ToolError("not writable", message) from None
        self.report["pending"] = None
        self.survey()
        self._report_plan(plan, "changed")

    def _report_plan(self, plan: list[Change], verb: str) -> None:
        self.report["changed"] = [change.path for change in plan]
        for change in plan:
            self.say(f"  {verb} {change.path}")
        done = "applied" if self.args.command == "apply" else "reverted"
        if not plan:
            self.say(f"nothing to do: {listed(self.names)} already {done}")
        elif verb == "changed":
            self.say(f"{done}: {listed(self.names)}. Running servers keep the old code: restart.")


def make_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--site", metavar="DIR", help="site-packages, environment, git checkout or"
                        " sglang folder (default: what this interpreter imports)")  # fmt: skip
    common.add_argument("--patches", metavar="DIR", help="folder with <release>/series")
    common.add_argument("--release", metavar="X", help="use patches/X (default: by version, then"
                        " by hashes; the hashes must fit in any case)")  # fmt: skip
    common.add_argument("--only", metavar="NAME,...", action="append", default=[],
                        help="these concerns instead of the whole series")  # fmt: skip
    common.add_argument("--json", action="store_true", help="one JSON object instead of text")
    about, _, codes = (__doc__ or "").partition("exit codes\n")
    parser = argparse.ArgumentParser(
        description=about,
        epilog="exit codes\n" + codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", parents=[common], help="state of every concern and file")
    commands.add_parser("verify", parents=[common], help="exit 0 if all is applied and exact")
    for name, text in (("apply", "apply the diffs"), ("revert", "take them back")):
        command = commands.add_parser(name, parents=[common], help=text)
        command.add_argument("--dry-run", action="store_true", help="say it, write nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    session = Session(make_parser().parse_args(argv))
    report = session.report
    commands = {"status": session.status, "verify": session.verify}
    try:
        session.choose()
        commands.get(session.args.command, session.change)()
    except ToolError as problem:
        report["exit"] = EXIT_CODES[problem.kind]
        report["error"] = {"kind": problem.kind, "message": str(problem)}
    except KeyboardInterrupt:
        report["exit"] = 130
        report["error"] = {"kind": "interrupted", "message": "interrupted"}
    if session.args.json:
        print(json.dumps(report, indent=2))
        return int(report["exit"])
    for line in session.lines:
        print(line)
    if "error" in report:
        sys.stdout.flush()
        print(f"error: {report['error']['message']}", file=sys.stderr)
    return int(report["exit"])


if __name__ == "__main__":
    sys.exit(main())
