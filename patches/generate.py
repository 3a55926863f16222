#!/usr/bin/env python3
"""Write patches/<release>/ from patches/source/ and SGLang's own wheels.

    python patches/generate.py                      all releases
    python patches/generate.py --release 0.5.9 --wheel sglang-0.5.9-py3-none-any.whl
    python patches/generate.py --check              exit 1 if what lies there is not what we'd write

`source/series` orders the concerns. `source/<concern>.py` holds data and imports nothing of ours:
WHAT, WHY, UPSTREAM and RETIRE become the header of its diffs, and one or both of these the diffs:

    SEAMS = ("<touch point>", ...)

names touch points of `sglang_spec_ext/compat`. In each release of `source/releases` that has them,
the function in use gets a line `@seam` and its file the import of it. Together the concerns name
all that is hooked there.

    EDITS = {"<release>": [{"file": "sglang/...", "anchor": text, "insert_after": text}, ...]}

`anchor` is whole lines that occur exactly once in the file as the concerns before this one leave
it, beside them exactly one of `insert_before`, `insert_after` and `replace`.

The output depends on nothing but these, our contracts and the wheel.
"""

from __future__ import annotations

import argparse
import ast
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
DECORATOR = "seam"
IMPORT = "from sglang_spec_ext.seams import seam\n"


class SourceError(Exception):
    """A concern's source does not fit the wheel or the format."""


class Concern(NamedTuple):
    name: str
    what: str
    why: str
    upstream: str
    retire: str
    seams: tuple[str, ...]
    edits: dict[str, list[dict[str, str]]]


class Place(NamedTuple):
    """A function or class attribute that gets a seam: touch point, file, name inside the file."""

    name: str
    path: str
    qualname: str


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
    missing = [key for key in ("WHAT", "WHY", "UPSTREAM", "RETIRE") if not values.get(key)]
    if not (values.get("SEAMS") or values.get("EDITS")):
        missing.append("SEAMS or EDITS")
    if missing:
        raise SourceError(f"{path} does not define {', '.join(missing)}")
    fields: list[Any] = [values[key] for key in ("WHAT", "WHY", "UPSTREAM", "RETIRE")]
    return Concern(path.stem, *fields, values.get("SEAMS", ()), values.get("EDITS", {}))


def load_releases(source: Path) -> list[str]:
    """Those that get the seams; none where there is no such list."""
    path = source / "releases"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def find_places(archive: zipfile.ZipFile, concerns: list[Concern]) -> list[Place]:
    """What the plugin hooks in this wheel. Raises SourceError unless each is in one concern."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from sglang_spec_ext.compat import workers

    contracted = [point for contract in workers.CONTRACTS for point in contract.points]
    paths = {f"{point.module.replace('.', '/')}.py" for point in contracted}
    with tempfile.TemporaryDirectory() as site:
        archive.extractall(site, paths & set(archive.namelist()))
        points = workers.hooked(Path(site))
    known = {point.name for point in contracted}
    named = [name for concern in concerns for name in concern.seams]
    for name in dict.fromkeys([*named, *(point.name for point in points)]):
        if name not in known:
            raise SourceError(f"there is no touch point {name}")
        if named.count(name) != 1:
            raise SourceError(f"touch point {name} is in {named.count(name)} concerns, not in one")
    return [Place(p.name, p.module.replace(".", "/") + ".py", p.qualname) for p in points]


def find_wheel(release: str, folder: Path) -> Path:
    """SGLang's wheel from `folder`, downloaded there with pip if it is not yet."""
    found = sorted(folder.glob(f"sglang-{release}-*.whl"))
    if not found:
        # Environments made by uv have no pip of their own; any Python's wheel has the same sources.
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


def seam_spans(text: str, qualnames: list[str]) -> list[Span]:
    """The spans that put seams on these functions and class attributes, and import the decorator.

    A seam wraps what a hook would: it goes above all decorators but those of descriptors.
    """
    tree = ast.parse(text)
    lines = lines_of(text)
    spans = [] if IMPORT in lines else [_import_span(tree)]
    for qualname in qualnames:
        node = _definition(tree, qualname)
        if isinstance(node, ast.AnnAssign):
            spans.append(_value_span(node, lines))
            continue
        above = [d for d in node.decorator_list if ast.unparse(d) not in DESCRIPTORS]
        at = (above[0] if above else node).lineno - 1
        spans.append(Span(at, at, [f"{' ' * node.col_offset}@{DECORATOR}\n"]))
    return spans


DESCRIPTORS = ("staticmethod", "classmethod")


def _import_span(tree: ast.Module) -> Span:
    """Beside SGLang's imports of itself, which every file that we touch has."""
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    own = next(node for node in imports if (node.module or "").startswith("sglang."))
    return Span(own.lineno - 1, own.lineno - 1, [IMPORT])


def _value_span(node: ast.AnnAssign, lines: list[str]) -> Span:
    """``name: annotation = value`` with the value in a seam."""
    value = node.value
    assert value is not None and value.lineno == value.end_lineno == node.end_lineno
    line = lines[node.end_lineno - 1].encode()
    start, end = value.col_offset, value.end_col_offset
    new = b"%s%s(%s)%s" % (line[:start], DECORATOR.encode(), line[start:end], line[end:])
    return Span(node.lineno - 1, node.end_lineno, [new.decode()])


def _definition(
    tree: ast.Module, qualname: str
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign:
    body = tree.body
    *owners, last = qualname.split(".")
    for owner in owners:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
    for node in body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == last:
            return node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == last:
            return node
    raise SourceError(f"{qualname} has no definition of its own")


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


def make_diff(
    concern: Concern,
    release: str,
    places: list[Place],
    files: dict[str, str],
    wheel: zipfile.ZipFile,
) -> str | None:
    """The concern's diff for one release; updates `files` (path -> content) to the result.

    None where the concern has nothing to do in this release.
    """
    edits: dict[str, list[dict[str, str]]] = {}
    for edit in concern.edits.get(release, []):
        edits.setdefault(edit["file"], []).append(edit)
    seams: dict[str, list[str]] = {}
    for place in places:
        if place.name in concern.seams:
            seams.setdefault(place.path, []).append(place.qualname)
    header = [
        field("Release", release),
        field("What", concern.what),
        field("Why", concern.why),
        field("Upstream", concern.upstream),
        field("Retire", concern.retire),
    ]
    body: list[str] = []
    for path in sorted({*edits, *seams}):
        where = f"{concern.name}, {release}, {path}"
        if path not in files:
            if path not in wheel.namelist():
                raise SourceError(f"{where}: not in the wheel")
            files[path] = wheel.read(path).decode()
        before = files[path]
        spans = [locate(before, edit, where) for edit in edits.get(path, [])]
        if path in seams:
            spans += seam_spans(before, seams[path])
        spans.sort()
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
    return "\n".join(header) + "\n\n" + "".join(body) if body else None


def make_release(
    release: str, concerns: list[Concern], wheel: Path, *, seams: bool
) -> dict[str, str]:
    """File name -> content of patches/<release>/."""
    with zipfile.ZipFile(wheel) as archive:
        if f"sglang-{release}.dist-info/METADATA" not in archive.namelist():
            raise SourceError(f"{wheel} is not the wheel of sglang {release}")
        places = find_places(archive, concerns) if seams else []
        files: dict[str, str] = {}
        made = {}
        for concern in concerns:
            diff = make_diff(concern, release, places, files, archive)
            if diff is not None:
                made[f"{concern.name}.diff"] = diff
    made["series"] = "".join(f"{name}\n" for name in made)
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
    seamed = load_releases(args.patches / "source")
    known = sorted({*seamed, *(release for concern in concerns for release in concern.edits)})
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
            wheel = args.wheel or find_wheel(release, wheels)
            made = make_release(release, concerns, wheel, seams=release in seamed)
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
