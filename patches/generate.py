#!/usr/bin/env python3
"""Write patches/<release>/ from patches/source/ and SGLang's own wheels.

    python patches/generate.py                      all releases
    python patches/generate.py --release 0.5.9 --wheel sglang-0.5.9-py3-none-any.whl
    python patches/generate.py --check              exit 1 if what lies there is not what we'd write

`source/series` orders the concerns. `source/<concern>.py` holds data and imports nothing of ours:
WHAT, WHY, UPSTREAM and RETIRE become the header of its diffs, and

    EDITS = {"<release>": [{"file": "sglang/...", "anchor": text, "insert_after": text}, ...]}

the diffs: `anchor` is whole lines that occur exactly once in the file as the concerns before this
one leave it, beside them exactly one of `insert_before`, `insert_after` and `replace`. The output
depends on nothing but these and the wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

PATCHES = Path(__file__).resolve().parent
CONTEXT = 3
ACTIONS = ("insert_before", "insert_after", "replace")


class SourceError(Exception):
    """A concern's source does not fit the wheel or the format."""


class Concern(NamedTuple):
    name: str
    what: str
    why: str
    upstream: str
    retire: str
    edits: dict[str, list[dict[str, str]]]


class Span(NamedTuple):
    """Lines [start, end) of the file before, and what stands there after."""

    start: int
    end: int
    lines: list[str]


def load_concerns(source: Path) -> list[Concern]:
    entries = [line.split("#")[0].strip() for line in (source / "series").read_text().splitlines()]
    names = [entry for entry in entries if entry]
    unlisted = sorted({path.stem for path in source.glob("*.py")} - set(names))
    if unlisted:
        raise SourceError(f"{source / 'series'} does not name {', '.join(unlisted)}")
    return [load_concern(source / f"{name}.py") for name in names]


def load_concern(path: Path) -> Concern:
    values = runpy.run_path(str(path))
    missing = [key for key in ("WHAT", "WHY", "UPSTREAM", "RETIRE", "EDITS") if not values.get(key)]
    if missing:
        raise SourceError(f"{path} does not define {', '.join(missing)}")
    fields: list[Any] = [values[key] for key in ("WHAT", "WHY", "UPSTREAM", "RETIRE", "EDITS")]
    return Concern(path.stem, *fields)


def find_wheel(release: str, folder: Path) -> Path:
    """SGLang's wheel from `folder`, downloaded there with pip if it is not yet."""
    found = sorted(folder.glob(f"sglang-{release}-*.whl"))
    if not found:
        # Environments made by uv have no pip of their own; the wheel is for every Python anyway.
        own = importlib.util.find_spec("pip") is not None
        command = [sys.executable, "-m", "pip"] if own else [shutil.which("pip") or "pip"]
        command += ["download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(folder), f"sglang=={release}"]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as problem:
            message = f"pip could not download sglang=={release} ({problem})"
            raise SourceError(f"{message}; give --wheel or --wheels") from None
        found = sorted(folder.glob(f"sglang-{release}-*.whl"))
    return found[0]


def lines_of(text: str) -> list[str]:
    """Lines with their ends; only a newline ends one (str.splitlines knows ten more characters)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def locate(text: str, edit: dict[str, str], where: str) -> Span:
    """The span of one edit. Raises SourceError unless its anchor is whole lines found once."""
    actions = [action for action in ACTIONS if action in edit]
    if len(actions) != 1 or set(edit) != {"file", "anchor", actions[0]}:
        raise SourceError(f"{where}: needs file, anchor and one of {', '.join(ACTIONS)}")
    anchor, new = edit["anchor"], edit[actions[0]]
    for name, value in (("anchor", anchor), (actions[0], new)):
        if not value.endswith("\n"):
            raise SourceError(f"{where}: {name} must end with a newline")
    found = [match.start() for match in re.finditer(f"(?m)^(?={re.escape(anchor)})", text)]
    if len(found) != 1:
        raise SourceError(f"{where}: the anchor occurs {len(found)} times, not once:\n{anchor}")
    start = text[: found[0]].count("\n")
    end = start + anchor.count("\n")
    lines = lines_of(new)
    if actions[0] == "insert_before":
        return Span(start, start, lines)
    if actions[0] == "insert_after":
        return Span(end, end, lines)
    old = lines_of(anchor)
    while old and lines and old[0] == lines[0]:
        old, lines, start = old[1:], lines[1:], start + 1
    while old and lines and old[-1] == lines[-1]:
        old, lines, end = old[:-1], lines[:-1], end - 1
    return Span(start, end, lines)


def apply_spans(lines: list[str], spans: list[Span]) -> list[str]:
    out: list[str] = []
    cursor = 0
    for span in spans:
        out += lines[cursor : span.start] + span.lines
        cursor = span.end
    return out + lines[cursor:]


def hunks(lines: list[str], spans: list[Span]) -> Iterable[str]:
    """Unified hunks of ordered, disjoint spans; from the spans, so no diff heuristics are in it."""
    shift = 0
    at = 0
    while at < len(spans):
        last = at
        while last + 1 < len(spans) and spans[last + 1].start - spans[last].end <= 2 * CONTEXT:
            last += 1
        group = spans[at : last + 1]
        first, end = max(0, group[0].start - CONTEXT), min(len(lines), group[-1].end + CONTEXT)
        body: list[str] = []
        cursor = first
        for span in group:
            body += [f" {line}" for line in lines[cursor : span.start]]
            body += [f"-{line}" for line in lines[span.start : span.end]]
            body += [f"+{line}" for line in span.lines]
            cursor = span.end
        body += [f" {line}" for line in lines[cursor:end]]
        growth = sum(len(span.lines) - (span.end - span.start) for span in group)
        old, new = end - first, end - first + growth
        yield f"@@ -{first + 1},{old} +{first + 1 + shift},{new} @@\n"
        for line in body:
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        shift += growth
        at = last + 1


def field(key: str, value: str) -> str:
    text = " ".join(value.split())
    return textwrap.fill(
        f"{key}: {text}", 98, subsequent_indent=" ", break_long_words=False, break_on_hyphens=False
    )


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_diff(concern: Concern, release: str, files: dict[str, str], wheel: zipfile.ZipFile) -> str:
    """The concern's diff for one release; updates `files` (path -> content) to the result."""
    by_file: dict[str, list[dict[str, str]]] = {}
    for edit in concern.edits[release]:
        by_file.setdefault(edit["file"], []).append(edit)
    header = [
        field("Release", release),
        field("What", concern.what),
        field("Why", concern.why),
        field("Upstream", concern.upstream),
        field("Retire", concern.retire),
    ]
    body: list[str] = []
    for path in sorted(by_file):
        where = f"{concern.name}, {release}, {path}"
        if path not in files:
            if path not in wheel.namelist():
                raise SourceError(f"{where}: not in the wheel")
            files[path] = wheel.read(path).decode()
        before = files[path]
        spans = sorted(locate(before, edit, where) for edit in by_file[path])
        # Two insertions at one line would depend on the order of their texts.
        if any(a.end > b.start or a[:2] == b[:2] for a, b in itertools.pairwise(spans)):
            raise SourceError(f"{where}: two edits overlap")
        lines = lines_of(before)
        after = "".join(apply_spans(lines, spans))
        if path.endswith(".py"):
            compile(after, path, "exec")
        files[path] = after
        header += [f"Before: sha256:{sha256(before)} {path}"]
        header += [f"After: sha256:{sha256(after)} {path}"]
        body += [f"--- a/{path}\n", f"+++ b/{path}\n", *hunks(lines, spans)]
    return "\n".join(header) + "\n\n" + "".join(body)


def make_release(release: str, concerns: list[Concern], wheel: Path) -> dict[str, str]:
    """File name -> content of patches/<release>/."""
    with zipfile.ZipFile(wheel) as archive:
        if f"sglang-{release}.dist-info/METADATA" not in archive.namelist():
            raise SourceError(f"{wheel} is not the wheel of sglang {release}")
        files: dict[str, str] = {}
        chosen = [concern for concern in concerns if release in concern.edits]
        made = {f"{c.name}.diff": make_diff(c, release, files, archive) for c in chosen}
    made["series"] = "".join(f"{concern.name}.diff\n" for concern in chosen)
    return made


def read_folder(folder: Path) -> dict[str, str]:
    return {path.name: path.read_bytes().decode() for path in sorted(folder.iterdir())}


def write_folder(folder: Path, made: dict[str, str]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for name, text in made.items():
        (folder / name).write_bytes(text.encode())


def release_folders(patches: Path) -> list[Path]:
    return sorted(series.parent for series in patches.glob("[0-9]*/series"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--release", action="append", metavar="X", help="only this one; repeatable")
    parser.add_argument("--wheel", type=Path, help="SGLang's wheel, with one --release")
    parser.add_argument("--wheels", type=Path, help="folder to find wheels in and download them to")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--patches", type=Path, default=PATCHES, help="where source/ lies")
    args = parser.parse_args(argv)
    if args.wheel and len(args.release or []) != 1:
        parser.error("--wheel needs exactly one --release")
    try:
        return generate(args)
    except SourceError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


def generate(args: argparse.Namespace) -> int:
    concerns = load_concerns(args.patches / "source")
    known = sorted({release for concern in concerns for release in concern.edits})
    unknown = set(args.release or []) - set(known)
    if unknown:
        raise SourceError(f"no concern has edits for {', '.join(sorted(unknown))}")
    different = []
    if not args.release:
        different = [f for f in release_folders(args.patches) if f.name not in known]
    for folder in different:
        if not args.check:
            shutil.rmtree(folder)
    with tempfile.TemporaryDirectory() as temporary:
        wheels = args.wheels or Path(temporary)
        wheels.mkdir(parents=True, exist_ok=True)
        for release in args.release or known:
            made = make_release(release, concerns, args.wheel or find_wheel(release, wheels))
            folder = args.patches / release
            if not folder.is_dir() or read_folder(folder) != made:
                different.append(folder)
                if not args.check:
                    write_folder(folder, made)
    for folder in different:
        done = "written" if folder.is_dir() else "removed"
        print(f"{folder.name}: {'is not what source/ gives' if args.check else done}")
    if not different:
        print("up to date")
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
