"""What all releases of SGLang are compared by: their wheels."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from by_path import ROOT, load

from sglang_spec_ext.compat import workers

generator = load("patches/generate.py")  # knows how to fetch a wheel


@pytest.fixture(scope="session")
def wheel_of() -> Callable[[str], Path]:
    """The wheel of a release; the test is skipped where it cannot be had."""
    cache = ROOT / ".cache" / "wheels"  # ignored by git; keeps a second run off the network
    cache.mkdir(parents=True, exist_ok=True)

    def find(release: str) -> Path:
        try:
            return Path(generator.find_wheel(release, cache))
        except generator.SourceError as problem:
            pytest.skip(str(problem))

    return find


@pytest.fixture(scope="session")
def sources(
    wheel_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A folder with the modules of one release that have touch points, out of its wheel."""
    made: dict[str, Path] = {}

    def site(release: str) -> Path:
        if release not in made:
            wheel = wheel_of(release)
            made[release] = tmp_path_factory.mktemp(release)
            extract(wheel, made[release])
        return made[release]

    return site


def extract(wheel: Path, to: Path) -> None:
    stems = {p.module.replace(".", "/") for known in workers.CONTRACTS for p in known.points}
    wanted = {stem + end for stem in stems for end in (".py", "/__init__.py")}
    with zipfile.ZipFile(wheel) as archive:
        for name in wanted & set(archive.namelist()):
            archive.extract(name, to)
