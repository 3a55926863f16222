"""What is installed beside this interpreter and where it comes from. Imports nothing of it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

import sglang_spec_ext
from sglang_spec_ext.compat import bootstrap, contracts, entry_point, workers
from sglang_spec_ext.ops import nvidia

PLUGIN = "sglang-spec-ext"
# Distribution, and what it is imported as. Kernels changed their distribution's name once.
PACKAGES = (
    ("sglang", "sglang"),
    (PLUGIN, "sglang_spec_ext"),
    ("torch", "torch"),
    ("sglang-kernel", "sgl_kernel"),
    ("sgl-kernel", "sgl_kernel"),
    ("flashinfer-python", "flashinfer"),
    ("triton", "triton"),
    ("transformers", "transformers"),
)
_AFTER = re.compile(r"^After: sha256:([0-9a-f]{64}) (\S+)$", re.M)


@dataclass(frozen=True)
class Package:
    """One distribution: its version, and in words where its code comes from."""

    name: str
    version: str
    origin: str


@dataclass(frozen=True)
class Modified:
    """A file of SGLang that is not as its wheel had it; ``patch`` is empty for an unknown hand."""

    path: str
    patch: str


@dataclass(frozen=True)
class Installed:
    """This environment.

    Attributes:
        packages: those of PACKAGES that are here.
        plugin_system: whether SGLang loads plugins itself; where not, our ``.pth`` does.
        loads_us: whether its loader sees our entry point, or else our ``.pth`` is in effect here.
        seams: for each place that the plugin hooks, whether a diff of `patches/` calls the plugin.
        gaps: what the plugin needs and this SGLang lacks, in sentences.
        modified: files of SGLang that differ from its wheel; None where that cannot be told.
        gone: files of its wheel that are not there any more.
        gpus: one line each.
    """

    python: str
    system: str
    packages: tuple[Package, ...]
    plugin_system: bool
    loads_us: bool
    seams: Mapping[str, bool]
    gaps: tuple[str, ...]
    modified: tuple[Modified, ...] | None
    gone: tuple[str, ...]
    gpus: tuple[str, ...]

    @property
    def patched(self) -> bool:
        """Whether the diffs of `patches/` alone load the plugin wherever it has to be."""
        return bool(self.seams) and all(self.seams.values())

    def version(self, *names: str) -> str | None:
        """The version of the first of these distributions that is here."""
        found = {package.name: package.version for package in self.packages}
        return next((found[name] for name in names if name in found), None)


def look(patches: Path | None) -> Installed:
    """Look at everything; ``patches`` is a folder of diffs like our repository's."""
    site = contracts.site_dir()
    plugin_system = site is None or (site / "sglang" / "srt" / "plugins").is_dir()
    return Installed(
        python=f"{platform.python_version()}, {sys.executable}",
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        packages=tuple(_packages()),
        plugin_system=plugin_system,
        loads_us=entry_point.installed() if plugin_system else bootstrap.installed(),
        seams=workers.seams(),
        gaps=() if site is None else tuple(workers.check()),
        **_files(known_patches(patches)),
        gpus=tuple(_gpus()),
    )


def default_patches() -> Path | None:
    """The diffs of the checkout that this package runs from, None in an installed wheel."""
    folder = Path(sglang_spec_ext.__file__).resolve().parents[1] / "patches"
    return folder if folder.is_dir() else None


def known_patches(folder: Path | None) -> dict[tuple[str, str], str]:
    """``0.5.9/kimi_k25`` by path and sha256 of each file that the diffs in ``folder`` leave."""
    found = {}
    for diff in sorted(folder.glob("*/*.diff")) if folder else ():
        for digest, path in _AFTER.findall(diff.read_text(encoding="utf-8", errors="replace")):
            found[path, digest] = f"{diff.parent.name}/{diff.stem}"
    return found


def _packages() -> Iterator[Package]:
    for name, module in PACKAGES:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in ("sglang", PLUGIN) and (place := _place(module)) is not None:
                version = sglang_spec_ext.__version__ if name == PLUGIN else "?"
                yield Package(name, version, f"{place}, not installed by pip")
            continue
        yield Package(name, distribution.version or "?", _origin(distribution, module))


def _origin(distribution: metadata.Distribution, module: str) -> str:
    record = _direct_url(distribution)
    url = str(record.get("url", "")).removeprefix("file://")
    place = _place(module)
    commit = str(record.get("vcs_info", {}).get("commit_id", ""))[:9]
    if record.get("dir_info", {}).get("editable"):
        how = f"editable, {url}{_checkout(Path(url))}"
        expected = Path(url)
    else:
        how = f"built from {url}{f' at {commit}' if commit else ''}" if url else "wheel"
        expected = Path(str(distribution.locate_file("")))
    if place is None:
        return f"{how}, but nothing can be imported as {module}"
    if not place.resolve().is_relative_to(expected.resolve()):
        return f"{how}, but imported from {place}{_checkout(place)}"
    return how


def _direct_url(distribution: metadata.Distribution) -> dict[str, Any]:
    """PEP 610's record of what pip was given; empty for a package index."""
    try:
        found = json.loads(distribution.read_text("direct_url.json") or "{}")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _place(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def _checkout(folder: Path) -> str:
    """`` at 1234567`` for a git work tree, read without git."""
    for root in (folder, *folder.parents):
        git = root / ".git"
        try:
            head = (git / "HEAD").read_text().strip()
            if head.startswith("ref: "):
                head = (git / head[len("ref: ") :]).read_text().strip()
        except OSError:
            continue
        return f" at {head[:9]}"
    return ""


class _Files(TypedDict):
    modified: tuple[Modified, ...] | None
    gone: tuple[str, ...]


def _files(patches: Mapping[tuple[str, str], str]) -> _Files:
    """SGLang's Python files against the hashes of its wheel.

    Patch tools that are honest leave pip's RECORD alone, ours among them; so it still has the
    wheel's hashes.
    """
    try:
        files = metadata.distribution("sglang").files or []
    except metadata.PackageNotFoundError:
        files = []
    recorded = {
        file.as_posix(): (Path(str(file.locate())), file.hash.value)
        for file in files
        if file.parts[0] == "sglang" and file.suffix == ".py" and file.hash is not None
    }
    if not recorded:
        return {"modified": None, "gone": ()}  # editable: there is no wheel to compare with
    modified, gone = [], []
    for name, (path, value) in recorded.items():
        try:
            digest = hashlib.sha256(path.read_bytes())
        except OSError:
            gone.append(name)
            continue
        if base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode() != value:
            modified.append(Modified(name, patches.get((name, digest.hexdigest()), "")))
    return {"modified": tuple(modified), "gone": tuple(gone)}


def _gpus() -> Iterator[str]:
    rows = nvidia.ask("--query-gpu=index,name,driver_version,memory.total,memory.used")
    for index, name, driver, total, used in rows:
        yield f"GPU {index}: {name}, driver {driver}, {used} of {total} MB in use"
