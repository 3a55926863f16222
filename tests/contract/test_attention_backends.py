"""Every attention backend of every release decodes without speculation.

So a target-only step is a plain DECODE on each, and none needs what SGLang's own adaptive mode
does instead, a verify of one token. A backend that fails here has to get that, or a refusal.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_spec_ext.compat.releases import RELEASES

BASE = "AttentionBackend"
# of the linear layers of hybrid targets, which the threshold refuses
NOT_SERVED_WITH_A_THRESHOLD = "MambaAttnBackendBase"


@dataclass(frozen=True)
class Class:
    bases: tuple[str, ...]
    methods: frozenset[str]


def bound(statement: ast.stmt) -> list[str]:
    """Methods of a class that one statement of its body defines; some are taken from a sibling."""
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def classes_of(sources: list[str]) -> dict[str, Class]:
    """All classes of these files, by name."""
    return {
        node.name: Class(
            tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases),
            frozenset(name for part in node.body for name in bound(part)),
        )
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }


def lineage(name: str, classes: dict[str, Class]) -> set[str]:
    """The class and all that it inherits from, as far as they are known."""
    known = classes.get(name)
    above = (lineage(base, classes) for base in known.bases) if known else ()
    return {name}.union(*above)


def backends(classes: dict[str, Class]) -> dict[str, set[str]]:
    """Lineage of each attention backend below SGLang's base class, by name."""
    lines = {name: lineage(name, classes) for name in classes if name != BASE}
    return {
        name: line - {BASE}
        for name, line in lines.items()
        if BASE in line and NOT_SERVED_WITH_A_THRESHOLD not in line
    }


def without_decode(classes: dict[str, Class]) -> list[str]:
    decodes = {"forward", "forward_decode"}
    return [
        name
        for name, line in backends(classes).items()
        if not any(classes[one].methods & decodes for one in line if one in classes)
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_every_attention_backend_has_a_plain_decode(
    release: str, wheel_of: Callable[[str], Path]
) -> None:
    with zipfile.ZipFile(wheel_of(release)) as archive:
        sources = [
            archive.read(name).decode()
            for name in archive.namelist()
            if name.startswith("sglang/srt/") and "/attention/" in name and name.endswith(".py")
        ]
    classes = classes_of(sources)
    assert {
        "FlashAttentionBackend",
        "FlashInferAttnBackend",
        "FlashInferMLAAttnBackend",
        "FlashMLABackend",
        "TritonAttnBackend",
        "TRTLLMMLABackend",
    } <= backends(classes).keys()
    assert without_decode(classes) == []


def test_a_backend_that_verifies_only() -> None:
    source = """
class AttentionBackend:
    def forward_decode(self): raise NotImplementedError
class Plain(AttentionBackend):
    def forward_decode(self): pass
class Below(Plain): pass
class Sibling(AttentionBackend):
    forward = Plain.forward_decode
class VerifiesOnly(base.AttentionBackend):
    def forward_extend(self): pass
class Other:
    def forward_extend(self): pass
"""
    assert without_decode(classes_of([source])) == ["VerifiesOnly"]
