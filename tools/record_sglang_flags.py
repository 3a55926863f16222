#!/usr/bin/env python3
"""Record the command-line flags and environment variables of SGLang releases from their wheels.

    pip download --no-deps --dest wheels sglang==0.5.23
    python tools/record_sglang_flags.py wheels/*.whl

Each wheel is unpacked to a temporary folder and its own parser is asked, in a process without a
GPU, by an interpreter that has SGLang's dependencies (--python). The answer goes to the table that
`sglang-spec-ext preflight` reads where the server's SGLang cannot be imported. Standard library
only; run it again when a release is added.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PREFLIGHT = Path(__file__).resolve().parents[1] / "sglang_spec_ext" / "ops" / "preflight"
DUMP = PREFLIGHT / "dump_parser.py"
TABLE = PREFLIGHT / "flags.json"
VARIABLE = re.compile(r"\bSGL(?:ANG)?_[A-Z0-9_]*[A-Z0-9]\b")

# One set of dependencies serves all releases, though each wants its own. A newer transformers
# already knows some models that an older SGLang registers; their flags do not care.
PRELUDE = """
import runpy, sys
from transformers import AutoConfig
register = AutoConfig.register
AutoConfig.register = staticmethod(lambda kind, config, exist_ok=0: register(kind, config, True))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def flags_of(sources: Path, python: str) -> list[dict[str, Any]]:
    """Ask the parser below ``sources`` with its own code. Raises SystemExit with its last words."""
    environment = os.environ | {
        "PYTHONPATH": str(sources),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    answer = subprocess.run(
        [python, "-c", PRELUDE, str(DUMP)], env=environment, capture_output=True, text=True
    )
    found = re.search(r"<<<flags\n(.*)\nflags>>>", answer.stdout, re.S)
    if answer.returncode or found is None:
        raise SystemExit(f"{sources}: the parser did not answer\n{answer.stderr[-2000:]}")
    flags: list[dict[str, Any]] = json.loads(found[1])["flags"]
    return flags


def variables_of(sources: Path) -> set[str]:
    """Names of SGLang's own environment variables anywhere in the release's code."""
    names: set[str] = set()
    for path in (sources / "sglang").rglob("*.py"):
        if "test" not in path.relative_to(sources).parts:
            names |= set(VARIABLE.findall(path.read_text(encoding="utf-8", errors="replace")))
    return names


def version_of(wheel: Path) -> str:
    """`sglang-0.5.12.post1-cp311-...whl` -> `0.5.12.post1`."""
    return wheel.name.split("-")[1]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def merge(by_release: dict[str, list[Any]]) -> list[list[Any]]:
    """``[[first release, last release, thing], ...]``, one entry per run of equal things."""
    releases = list(by_release)
    runs: dict[str, list[tuple[int, int]]] = {}
    things: dict[str, Any] = {}
    for place, release in enumerate(releases):
        for thing in by_release[release]:
            key = json.dumps(thing, sort_keys=True)
            things[key] = thing
            mine = runs.setdefault(key, [])
            if mine and mine[-1][1] == place - 1:
                mine[-1] = (mine[-1][0], place)
            else:
                mine.append((place, place))
    return [
        [releases[first], releases[last], things[key]]
        for key in sorted(runs)
        for first, last in runs[key]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, help="the sglang wheels, all releases")
    parser.add_argument("--python", default=sys.executable, help="has SGLang's dependencies")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    flags: dict[str, list[Any]] = {}
    variables: dict[str, list[Any]] = {}
    for wheel in sorted(options.wheels, key=lambda path: numbers(version_of(path))):
        version = version_of(wheel)
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(folder)
            flags[version] = flags_of(Path(folder), options.python)
            variables[version] = sorted(variables_of(Path(folder)))
        print(f"{version}: {len(flags[version])} flags, {len(variables[version])} variables")
    lines = ["{", f'"releases": {json.dumps(list(flags))},']
    for name, by_release, end in (("flags", flags, ","), ("variables", variables, "")):
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in merge(by_release))
        lines += [f'"{name}": [', rows, f"]{end}"]
    options.out.write_text("\n".join([*lines, "}", ""]), encoding="utf-8")
    print(f"wrote {options.out} ({options.out.stat().st_size // 1024} KB)")


if __name__ == "__main__":
    main()
