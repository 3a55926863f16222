"""Ask the SGLang that the command would start for its own flags, without touching a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_spec_ext.ops.preflight.config_file import ConfigError, ConfigFile, Entry, unreadable
from sglang_spec_ext.ops.preflight.flags import Flag, FlagTable

DUMP = Path(__file__).with_name("dump_parser.py")
TIMEOUT = 180.0  # seconds; importing SGLang from a cold network disk takes minutes
_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"


@dataclass(frozen=True)
class Answer:
    """``config`` is None where no file was given, or its reader is of a form not known here.

    ``refused``: SGLang does not take the file.
    """

    table: FlagTable
    config: ConfigFile | None = None
    refused: ConfigError | None = None


def interpreter_of(launcher: tuple[str, ...]) -> str | None:
    """The Python that would run the command: named in it, or by the first line of `sglang`."""
    if not launcher:
        return None
    program = shutil.which(launcher[0])
    if program is None:
        return None
    if re.fullmatch(r"python[\d.]*", Path(launcher[0]).name):
        return program
    try:
        with open(program, "rb") as script:
            first = script.readline(512)
    except OSError:
        return None
    found = re.match(rb"#! *(\S*python[\d.]*)", first)
    return found[1].decode(errors="replace") if found else None


def version_of(python: str) -> str | None:
    """The version of SGLang beside an interpreter, without importing it."""
    try:
        answer = subprocess.run(
            [python, "-c", _VERSION], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def ask(python: str, environment: Mapping[str, str], config: str | None = None) -> Answer | None:
    """The flags of the installed parser, plugins included; None when it cannot be asked.

    ``environment`` are the variables that the command sets, ``config`` the file of its --config.
    All GPUs are hidden from the process.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        answer = subprocess.run(
            [python, str(DUMP), "--plugins", *(["--config", config] if config else [])],
            env={**os.environ, **environment, **hidden},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"<<<flags\n(.*)\nflags>>>", answer.stdout, re.S)
    if found is None:
        return None
    dump = json.loads(found[1])
    version = str(dump["version"])
    origin = f"the parser of the installed SGLang {version}"
    table = FlagTable(version, [Flag.from_json(each) for each in dump["flags"]], origin)
    read = dump.get("config") or {}
    if config is None or not read:
        return Answer(table)
    if "error" in read:
        return Answer(table, refused=unreadable(config, str(read["error"])))
    entries = [Entry(key, tuple(words), error, kind) for key, words, error, kind in read["entries"]]
    return Answer(table, ConfigFile(config, entries))
