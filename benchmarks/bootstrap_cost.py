#!/usr/bin/env python3
"""What our `.pth` adds to each start of an interpreter, in milliseconds.

    python benchmarks/bootstrap_cost.py

Two environments that differ in nothing else run `python -c pass` in turn, so that whatever else
happens on the machine meets both. Of each pair the difference counts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import machine

sys.path.insert(0, str(machine.ROOT))

from sglang_spec_ext import __version__

PACKAGE = machine.ROOT / "sglang_spec_ext"
PTH = PACKAGE / "compat" / "sglang_spec_ext_bootstrap.pth"
LOADED = "import sys; print('sglang_spec_ext.compat.bootstrap' in sys.modules)"
WARM_UP = 5  # pairs that fill the page cache and write the bytecode


def environment(folder: Path, with_pth: bool) -> Path:
    """An environment with our package, as a wheel leaves it; returns its interpreter."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(PACKAGE, site / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    if with_pth:
        shutil.copy(PTH, site)
    python = folder / "bin" / "python"
    loaded = subprocess.check_output([python, "-c", LOADED], env={}, text=True).strip()
    if loaded != str(with_pth):
        sys.exit(f"{python} has loaded the bootstrap: {loaded}, expected {with_pth}")
    return python


def start(python: Path) -> float:
    """Milliseconds from the call to the end of an interpreter that has nothing to do."""
    before = time.perf_counter()
    subprocess.run([python, "-c", "pass"], env={}, check=True)
    return 1000 * (time.perf_counter() - before)


def describe(milliseconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(milliseconds, n=4)
    figures = {"lower_quartile": low, "median": median, "upper_quartile": high}
    return {name: round(figure, 3) for name, figure in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "bootstrap-cost.json")
    parser.add_argument("--pairs", type=int, default=300)
    options = parser.parse_args()
    about = machine.describe()
    starts: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        pythons = {
            name: environment(Path(folder, name), with_pth=name == "with") for name in starts
        }
        for pair in range(WARM_UP + options.pairs):
            # each is the first of a pair as often as the other
            for name in sorted(starts, reverse=bool(pair % 2)):
                taken = start(pythons[name])
                if pair >= WARM_UP:
                    starts[name].append(round(taken, 3))
    added = [w - wo for w, wo in zip(starts["with"], starts["without"], strict=True)]
    result = {
        "what": "milliseconds from the call of `python -c pass` to its end, with our .pth in the "
        "environment and without, started in turn; added is the difference of each pair",
        "command": f"python benchmarks/bootstrap_cost.py --pairs {options.pairs}",
        "machine": about,
        "sglang_spec_ext": __version__,
        "added": describe(added),
        **{name: describe(taken) for name, taken in starts.items()},
        "starts": starts,
    }
    machine.write(result, options.out)
    for name in ("without", "with", "added"):
        figures = describe(added if name == "added" else starts[name])
        print(name.ljust(8), "  ".join(f"{key} {value:.2f} ms" for key, value in figures.items()))


if __name__ == "__main__":
    main()
