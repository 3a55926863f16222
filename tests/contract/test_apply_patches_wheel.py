"""The shipped diffs on SGLang's real wheels: apply, compile, hold the contract, revert exactly."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from by_path import ROOT, load

from sglang_spec_ext.compat import contracts, diffs, workers

PATCHES = ROOT / "patches"
TOOL = ROOT / "tools" / "apply_patches.py"
RELEASES = sorted(series.parent.name for series in PATCHES.glob("[0-9]*/series"))


generate = load("patches/generate.py")


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wheel(release: str, wheel_of: Callable[[str], Path]) -> Path:
    return wheel_of(release)


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def applied(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SGLang's sources with all diffs, to look at."""
    folder = tmp_path_factory.mktemp("applied")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder, [n for n in archive.namelist() if n.endswith((".py", "METADATA"))]
        )
    run("apply", folder)
    return folder


def run(command: str, site: Path) -> dict[str, Any]:
    argv = [sys.executable, str(TOOL), command, "--site", str(site), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def contents(site: Path) -> dict[str, bytes]:
    files = (path for path in site.rglob("*") if path.is_file())
    return {str(path.relative_to(site)): path.read_bytes() for path in files}


def test_applies_compiles_and_reverts_every_byte(release: str, site: Path) -> None:
    before = contents(site)
    report = run("apply", site)
    assert report["release"] == report["site"]["version"] == release
    assert report["changed"]
    after = contents(site)
    assert {path for path in after if after[path] != before.get(path)} == set(report["changed"])
    assert before.keys() == after.keys()  # RECORD untouched, nothing left over
    for path in report["changed"]:
        compile(after[path], path, "exec")
    run("verify", site)
    assert run("apply", site)["changed"] == []
    run("revert", site)
    assert contents(site) == before


def test_folder_is_what_the_generator_writes(release: str, wheel: Path) -> None:
    assert generate.main(["--check", "--release", release, "--wheel", str(wheel)]) == 0


def test_what_is_hooked_has_a_seam_and_the_contract_still_holds(
    release: str, applied: Path
) -> None:
    site = applied
    seams = workers.seams(site)
    assert seams and all(seams.values()), [target for target, seamed in seams.items() if not seamed]
    assert workers.check(site) == []
    fitting = [known for known in workers.told(site) if not contracts.check(site, known.points)]
    hooked = {point.target for point in workers.hooked(site)}
    for known in fitting:
        assert release in known.releases
        assert hooked >= {p.target for p in contracts.in_use(known.launcher, site)}
        assert hooked >= {p.target for p in contracts.in_use(known.scheduler, site)}


def test_what_a_reinstallation_took_back_is_named(
    release: str, wheel: Path, applied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File by file, with every other way to load the plugin closed."""
    monkeypatch.setattr(contracts, "site_dir", lambda: applied)
    monkeypatch.setattr(diffs, "_closed", lambda _: "closed")
    monkeypatch.setattr(diffs.releases, "installed_version", lambda: release)
    assert diffs.missing(patched=True) == []
    concerns = {p.stem: p.read_text() for p in sorted((PATCHES / release).glob("*.diff"))}
    touched = {
        line[6:] for text in concerns.values() for line in text.splitlines() if line[:6] == "+++ b/"
    }
    seamed = {path for path in touched if "@seam\n" in (applied / path).read_text()}
    assert len(seamed) >= 8
    for path in seamed:
        ours = (applied / path).read_bytes()
        with zipfile.ZipFile(wheel) as archive:
            (applied / path).write_bytes(archive.read(path))
        (said,) = diffs.missing()
        (applied / path).write_bytes(ours)
        named = said.partition("not applied: ")[2].partition(".")[0].split(", ")
        there = [name for name, text in concerns.items() if f"+++ b/{path}\n" in text]
        assert sorted(named) == there, path
        assert f"patches/{release}" in said


def test_without_the_package_importing_sglang_names_both_ways_out(applied: Path) -> None:
    argv = [sys.executable, "-S", "-c", "import sglang"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=applied, env={})
    assert done.returncode == 1
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("ImportError: this SGLang is patched to call sglang_spec_ext")
    assert "pip install sglang-spec-ext" in sentence
    assert "apply_patches.py revert" in sentence


def kimi_methods(site: Path) -> dict[str, Any]:
    """The wrapper's EAGLE-3 methods, compiled without the modules that sglang imports."""
    tree = ast.parse((site / "sglang/srt/models/kimi_k25.py").read_text())
    wrapper = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "KimiK25ForConditionalGeneration"
    )
    names = ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head")
    wanted = [n for n in wrapper.body if isinstance(n, ast.FunctionDef) and n.name in names]
    lazy = ast.parse("from __future__ import annotations").body
    namespace: dict[str, Any] = {}
    exec(compile(ast.Module([*lazy, *wanted], []), "kimi_k25.py", "exec"), namespace)
    return {node.name: namespace[node.name] for node in wanted}


@pytest.mark.parametrize("release", ["0.5.9"], indirect=True)
def test_kimi_hooks_reach_the_language_model(site: Path) -> None:
    assert kimi_methods(site) == {}
    run("apply", site)
    calls: list[Any] = []
    wrapper = SimpleNamespace(
        language_model=SimpleNamespace(
            set_eagle3_layers_to_capture=lambda ids: calls.append(ids),
            get_embed_and_head=lambda: ("embed", "head"),
            set_embed_and_head=lambda embed, head: calls.append((embed, head)),
        )
    )
    methods = kimi_methods(site)
    methods["set_eagle3_layers_to_capture"](wrapper)
    methods["set_eagle3_layers_to_capture"](wrapper, [1, 29, 57])
    assert methods["get_embed_and_head"](wrapper) == ("embed", "head")
    methods["set_embed_and_head"](wrapper, "e", "h")
    assert calls == [None, [1, 29, 57], ("e", "h")]
