#!/usr/bin/env python3
"""Read, without importing anything of it, which model classes of an SGLang have the EAGLE-3 hooks.

    python tools/eagle3_models.py SOURCES...         one line per class of an unpacked wheel
    python tools/eagle3_models.py --docs WHEELS      write docs/eagle3-hooks.md out of all wheels
    python tools/eagle3_models.py --docs WHEELS --check    exit 1 if it is not what we would write

SOURCES is a folder with ``sglang/``; WHEELS one with a wheel of each release (as `pip download
--no-deps` leaves them). What it finds is what `sglang_spec_ext/compat/eagle3_models.py` must say;
tests/contract holds the one against the other.
"""

from __future__ import annotations

import argparse
import ast
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from sglang_spec_ext.compat.eagle3_models import ROWS, Row  # noqa: E402
from sglang_spec_ext.compat.releases import RELEASES, describe  # noqa: E402

WHY_NOT = {
    "loop": "its layers collect no states",
    "dspark": "its layers collect states for DSPARK only",
}
DOCS = ROOT / "docs" / "eagle3-hooks.md"
MODELS = "sglang/srt/models/"

HOOK = "set_eagle3_layers_to_capture"
DFLASH_HOOK = "set_dflash_layers_to_capture"
DSPARK_HOOK = "set_dspark_layers_to_capture"
# Attributes under which a wrapper may keep a language model whose class only the checkpoint decides
LANGUAGE_MODELS = ("language_model", "llm")

DRAFT_MODULES = ("nextn", "mtp", "eagle", "dflash", "dspark", "lilicorr")
NOT_GENERATING = (
    "Bert", "BidirectionalModel", "CLIP", "Classification", "Contriever", "Embedding", "Reward",
    "Normal_Weights", "PixtralVisionModel", "SiglipModel", "CLIPModel",
)  # fmt: skip

Key = tuple[str, str]  # module without the package, class


@dataclass(frozen=True)
class Found:
    """What the sources of one release say about one class that it can serve.

    Attributes:
        module, name: where it is.
        how: native, delegate, setter, unpack, dflash, or why there is nothing to be done: draft,
            other (it generates nothing), dspark (it collects states for that algorithm only), loop
            (its layers collect no states).
        inner: the attribute that holds the model with the layers or the hook; empty for none.
        inner_classes: the classes that it may hold, as far as the sources tell.
    """

    module: str
    name: str
    how: str
    inner: str = ""
    inner_classes: tuple[str, ...] = ()


class Models:
    """The model classes of one release.

    Args:
        sources: text of every file under ``sglang/srt/models``, by dotted module name below it.
    """

    def __init__(self, sources: Mapping[str, bytes]) -> None:
        self._classes: dict[Key, ast.ClassDef] = {}
        self._reads: dict[Key, set[str]] = {}
        self._lineages: dict[Key, list[Key]] = {}
        self._imports: dict[str, dict[str, Key]] = {}
        self.served: list[Key] = []
        for module, text in sources.items():
            self._read(module, ast.parse(text))

    @classmethod
    def of_folder(cls, site: Path) -> Models:
        base = site / MODELS
        files = {f.relative_to(base).as_posix(): f.read_bytes() for f in base.rglob("*.py")}
        if not files:
            raise SystemExit(f"{base} holds no model files; give the folder that contains sglang/")
        return cls(_by_module(files))

    @classmethod
    def of_wheel(cls, wheel: Path) -> Models:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith(MODELS) and n.endswith(".py")]
            return cls(_by_module({n.removeprefix(MODELS): archive.read(n) for n in names}))

    @cached_property
    def found(self) -> dict[str, Found]:
        """By class name, for every class in an ``EntryClass``."""
        found = (self._classify(key) for key in self.served)
        return {one.name: one for one in sorted(found, key=lambda one: (one.module, one.name))}

    # ------------------------------------------------------------------ reading

    def _read(self, module: str, tree: ast.Module) -> None:
        imports: dict[str, Key] = {}
        self._imports[module] = imports
        for node in _statements(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                origin = node.module.removeprefix("sglang.srt.models.")
                for alias in node.names:
                    imports[alias.asname or alias.name] = (origin, alias.name)
        entries: list[str] = []
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._classes[module, node.name] = node
            elif isinstance(node, ast.Assign) and _assigns(node, "EntryClass"):
                listed = isinstance(node.value, ast.List | ast.Tuple)
                elements = node.value.elts if listed else [node.value]  # type: ignore[attr-defined]
                entries = [e.id for e in elements if isinstance(e, ast.Name)]
        self.served += [(module, name) for name in entries if (module, name) in self._classes]

    def _resolve(self, module: str, name: str) -> Key | None:
        seen: set[Key] = set()
        while (module, name) not in self._classes:
            origin = self._imports.get(module, {}).get(name)
            if origin is None or origin in seen:
                return None
            seen.add(origin)
            module, name = origin
        return module, name

    def _lineage(self, key: Key) -> list[Key]:
        """The class and its bases, nearest first, as far as they are model classes."""
        if key in self._lineages:
            return self._lineages[key]
        found = [key]
        for base in self._classes[key].bases:
            name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
            parent = self._resolve(key[0], name)
            if parent is not None:
                found += [one for one in self._lineage(parent) if one not in found]
        self._lineages[key] = found
        return found

    def _methods(self, key: Key) -> Iterator[tuple[Key, ast.FunctionDef]]:
        for owner in self._lineage(key):
            for node in self._classes[owner].body:
                if isinstance(node, ast.FunctionDef):
                    yield owner, node

    def _has(self, key: Key, method: str) -> bool:
        return any(node.name == method for _, node in self._methods(key))

    def _uses(self, key: Key, attribute: str) -> bool:
        """Whether a method of the class or its bases reads ``self.<attribute>``."""
        return any(attribute in self._read_by(owner) for owner in self._lineage(key))

    def _read_by(self, owner: Key) -> set[str]:
        if owner not in self._reads:
            self._reads[owner] = {
                node.attr
                for node in ast.walk(self._classes[owner])
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and _is_self(node.value)
            }
        return self._reads[owner]

    def _held(self, key: Key) -> dict[str, list[Key | None]]:
        """Classes of ``self.<attribute> = Class(...)``; None for one that only run time knows."""
        held: dict[str, list[Key | None]] = {}
        for owner, method in self._methods(key):
            for node in ast.walk(method):
                if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                    continue
                for target in node.targets:
                    if isinstance(target, ast.Attribute) and _is_self(target.value):
                        made = self._made(key, owner[0], method, node.value)
                        held.setdefault(target.attr, []).extend(made)
        return held

    def _made(
        self, key: Key, module: str, method: ast.FunctionDef, call: ast.Call
    ) -> list[Key | None]:
        """The classes that ``call`` may make."""
        maker = call.func
        if isinstance(maker, ast.Attribute) and _is_self(maker.value):
            # a factory of the class itself: what its versions return
            for owner, other in self._methods(key):
                if other.name == maker.attr and other is not method:
                    returned = [
                        made
                        for node in ast.walk(other)
                        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
                        for made in self._made(key, owner[0], other, node.value)
                    ]
                    return returned or [None]
            return [None]
        name = maker.id if isinstance(maker, ast.Name) else getattr(maker, "attr", "")
        found = self._resolve(module, name)
        if found is None:
            found = self._resolve(module, _default_of(method, name))
        return [found]

    # ------------------------------------------------------------------ judging

    def _classify(self, key: Key) -> Found:
        module, name = key
        if self._is_draft(key):
            return Found(module, name, "draft")
        if any(word in name for word in NOT_GENERATING):
            return Found(module, name, "other")
        if self._has(key, HOOK):
            return Found(module, name, "native")
        held = self._held(key)
        for attribute, classes in held.items():
            known = tuple(dict.fromkeys(c for c in classes if c and self._gets_hook(c)))
            if known:
                names = tuple(name for _, name in known)
                return Found(module, name, "delegate", attribute, names)
        if self._has(key, DFLASH_HOOK):
            return Found(module, name, "dflash")
        if self._has(key, DSPARK_HOOK):
            return Found(module, name, "dspark")
        for classes in held.get("model", []), *held.values():
            for inner in filter(None, classes):
                if self._uses(inner, "layers_to_capture") and self._uses(key, "logits_processor"):
                    aware = self._uses(key, "capture_aux_hidden_states")
                    attribute = next(a for a, c in held.items() if c is classes)
                    how = "setter" if aware else "unpack"
                    return Found(module, name, how, attribute, (inner[1],))
        for attribute in LANGUAGE_MODELS:
            if held.get(attribute) and None in held[attribute]:
                return Found(module, name, "delegate", attribute)
        if self._has(key, "__getattr__"):
            # it stands before another object, which it asks for everything
            return Found(module, name, "delegate", "?")
        return Found(module, name, "loop")

    def _is_draft(self, key: Key) -> bool:
        return any(word in key[0].rpartition(".")[2] for word in DRAFT_MODULES)

    def _gets_hook(self, key: Key) -> bool:
        """Whether a class that holds one of these has somebody to delegate to."""
        if self._has(key, HOOK):
            return True
        return key in self.served and self._classify(key).how in ("delegate", "setter", "unpack")


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below ``node``; much less than all nodes, where expressions do not matter."""
    for field in ("body", "orelse", "finalbody", "handlers"):
        for inner in getattr(node, field, ()):
            if isinstance(inner, ast.stmt):
                yield inner
            yield from _statements(inner)


def _by_module(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
        for path, text in sorted(files.items())
    }


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _default_of(method: ast.FunctionDef, parameter: str) -> str:
    """The name that a parameter has as its default; empty without one."""
    arguments = method.args.posonlyargs + method.args.args
    defaults = method.args.defaults
    for argument, default in zip(
        arguments[len(arguments) - len(defaults) :], defaults, strict=True
    ):
        if argument.arg == parameter and isinstance(default, ast.Name):
            return default.id
    return ""


HEADER = """# Which targets EAGLE-3 and DFLASH can draft for

They draft from hidden states of some of the target's layers, so the target's class must be able to
capture them. *native*: SGLang's class can. *by us*: it lacks the methods, and the plugin gives them
to it when it is loaded (`sglang_spec_ext/eagle3_hooks/`). *not possible*: its layers collect no
states, so its forward would have to be rewritten; the plugin refuses such a target before its
weights load, and so it does one that wraps such a class. SGLang {first} to {last}; draft
classes, and classes that generate nothing, are left out. Read out of the sources, and written by
`python tools/eagle3_models.py --docs WHEELS`; the classes that have been run are in
`tests/engine/eagle3_families.py`.

On SGLang's spec-v1 worker (up to 0.5.12.post1) an EAGLE-3 draft goes wrong in three more ways,
which the plugin mends for all these classes: graphs of the verify capture SGLang's default layers
instead of the draft's (up to 0.5.10.post1); where an image or audio is, the draft sees other
embeddings than the target; and on 0.5.9 its decode steps are one position too far on.

| class | native in | by us in | not possible in | how, or why not |
|---|---|---|---|---|
"""


def document(found: Mapping[str, Mapping[str, Found]], rows: Sequence[Row]) -> str:
    """The page for readers: each class with the releases in which it is native, ours or neither.

    Args:
        found: by release, then by class name.
        rows: the table of what we add.
    """
    lines = []
    classes = {name: one.module for of in found.values() for name, one in of.items()}
    for name, module in sorted(classes.items(), key=lambda item: (item[1], item[0])):
        ours = {r: row for r in found for row in rows if row.name == name and row.covers(r)}
        cells: dict[str, list[str]] = {"native": [], "ours": [], "never": []}
        whys: list[str] = []
        for release, of in found.items():
            one = of.get(name)
            if one is None or one.how in ("draft", "other"):
                continue
            row = ours.get(release)
            if one.how == "native":
                cells["native"].append(release)
            elif row is not None:
                cells["ours"].append(release)
                whys.append(f"{row.how.value} (`{row.inner}`)" if row.inner else row.how.value)
                whys.append(row.why)
            else:
                cells["never"].append(release)
                whys.append(WHY_NOT[one.how])
        if any(cells.values()):
            spans = [_span(releases, len(found)) for releases in cells.values()]
            why = "; ".join(dict.fromkeys(filter(None, whys)))
            lines.append(f"| `{module}.{name}` | {' | '.join(spans)} | {why} |")
    releases = list(found)
    return HEADER.format(first=releases[0], last=releases[-1]) + "\n".join(lines) + "\n"


def _span(releases: Sequence[str], of: int) -> str:
    return "all" if len(releases) == of else describe(releases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="*", type=Path, help="folders that contain sglang/")
    parser.add_argument("--docs", type=Path, metavar="WHEELS", help=f"write {DOCS.name}")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    given = parser.parse_args()
    for site in given.sources:
        for one in Models.of_folder(site).found.values():
            print(one.how, one.module, one.name, one.inner, *one.inner_classes)
    if given.docs is None:
        return 0
    wheels = {}
    for release in RELEASES:
        matching = sorted(given.docs.glob(f"sglang-{release}-*.whl"))
        if not matching:
            parser.error(f"{given.docs} has no wheel of SGLang {release}")
        wheels[release] = matching[0]
    text = document({r: Models.of_wheel(wheel).found for r, wheel in wheels.items()}, ROWS)
    if given.check:
        return 0 if DOCS.exists() and DOCS.read_text() == text else 1
    DOCS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
