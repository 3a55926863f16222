"""SGLang's `--config FILE.yaml`: which words it puts in front of the command line, key by key.

The installed release is asked itself (`dump_parser.py`). This is what all known releases do, for
where none can be asked; `tests/contract` holds it against each release's own code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sglang_spec_ext.compat.releases import RELEASES, nearest
from sglang_spec_ext.ops.preflight.flags import Flag, FlagTable

CONFIG_FLAG = "--config"
SUFFIXES = (".yaml", ".yml")
NESTED_AS_JSON = "0.5.14"  # before, a nested value became Python's text of it
EVERY_SPELLING = "0.5.23"  # before, only the name of a flag's destination counted as its key


class ConfigError(ValueError):
    """SGLang would stop at the file or at its place in the command; the message says why."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class Entry:
    """One key: the words that SGLang makes of it, or SGLang's words against it.

    ``kind`` is the name of the value's Python type.
    """

    key: str
    words: tuple[str, ...] = ()
    error: str = ""
    kind: str = "str"


@dataclass(frozen=True)
class ConfigFile:
    """What the file adds. ``path`` is as it was written."""

    path: str
    entries: Sequence[Entry] = field(default=())


def take_out(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file that SGLang would read, and the other arguments. Raises ConfigError.

    SGLang sees the flag only where it stands in full and the path is the next word.
    """
    rest = list(arguments)
    count = rest.count(CONFIG_FLAG)
    if count == 0:
        return None, rest
    if count > 1:
        raise ConfigError(
            f"{CONFIG_FLAG} is given {count} times; SGLang takes one file and stops",
            "put all keys into one file",
        )
    place = rest.index(CONFIG_FLAG)
    found = rest[place + 1 : place + 2]
    if not found or found[0].startswith("--"):
        raise ConfigError(f"{CONFIG_FLAG} needs a file", "write the path of a YAML file behind it")
    return found[0], rest[:place] + rest[place + 2 :]


def drop(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """All that belongs to the flag, however it is used, and the other arguments."""
    ours: list[str] = []
    rest: list[str] = []
    for before, word in zip(("", *arguments), arguments, strict=False):
        is_value = before == CONFIG_FLAG and not word.startswith("--")
        (ours if is_value or word == CONFIG_FLAG else rest).append(word)
    return ours, rest


def check_path(path: str) -> None:
    """Raises ConfigError where SGLang would not get as far as the file's content."""
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{CONFIG_FLAG} {path}: SGLang reads YAML only, and knows it by the name",
            f"give a file that ends in {' or '.join(SUFFIXES)}",
        )
    if not file.exists():
        raise ConfigError(
            f"{CONFIG_FLAG} {path}: no such file",
            "correct the path; one inside a container can only be read there",
        )
    try:
        file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{CONFIG_FLAG} {path} cannot be read: {error.strerror}", "give a file that can"
        ) from error


def unreadable(path: str, reason: str) -> ConfigError:
    """The error for content that YAML or SGLang does not take; ``reason`` in their words."""
    return ConfigError(
        f"{CONFIG_FLAG} {path}: {' '.join(reason.split())}",
        "write one `flag-name: value` per line, the name without its dashes",
    )


def read(path: str, table: FlagTable) -> ConfigFile:
    """The file as the release of ``table`` reads it. Raises ConfigError."""
    return ConfigFile(path, entries(load(path), table))


def load(path: str) -> dict[Any, Any]:
    """All keys of the file and their values. Raises ConfigError."""
    check_path(path)
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, ValueError) as error:
        raise unreadable(path, str(error)) from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise unreadable(path, "Config file must contain a dictionary at root level")
    return values


def entries(values: Mapping[Any, Any], table: FlagTable) -> list[Entry]:
    """The words for each key, in the file's order."""
    release = RELEASES.index(nearest(table.release)[0])
    every_spelling = release >= RELEASES.index(EVERY_SPELLING)
    switches: set[str] = set()
    taken: set[str] = set()
    refused: set[str] = set()
    for flag in table.flags:
        keys = _keys(flag, every_spelling)
        if flag.kind == "store_true" and not _own_action(flag):
            switches |= keys
        if _supported(flag, every_spelling):
            taken |= keys
        else:
            refused |= keys
    refused -= taken if every_spelling else set()
    found = []
    for key, value in values.items():
        kind = type(value).__name__
        if not isinstance(key, str):
            words = f"AttributeError: {type(key).__name__!r} object has no attribute 'replace'"
            found.append(Entry(str(key), error=words, kind=kind))
        elif key.replace("-", "_") in refused:
            found.append(Entry(key, error=f"Unsupported config option {key!r}", kind=kind))
        else:
            is_switch = key.replace("-", "_") in switches
            nested_as_json = release >= RELEASES.index(NESTED_AS_JSON)
            found.append(Entry(key, tuple(_words(key, value, is_switch, nested_as_json)), "", kind))
    return found


def _words(key: str, value: Any, is_switch: bool, nested_as_json: bool) -> list[str]:
    flag = f"--{key}"
    if isinstance(value, bool):
        if is_switch:
            return [flag] if value else []
        return [flag, str(value).lower()]
    if isinstance(value, list):
        return [flag, *map(str, value)] if value else []
    if isinstance(value, dict) and nested_as_json:
        return [flag, json.dumps(value)]
    return [flag, str(value)]


def _own_action(flag: Flag) -> bool:
    """Whether SGLang handles the flag by an argparse action of its own."""
    return flag.deprecated or flag.dest == "lora_paths"


def _supported(flag: Flag, any_action: bool) -> bool:
    if any_action and flag.takes_value and flag.nargs is None:
        return True
    return flag.kind in ("store", "store_true") and not _own_action(flag)


def _keys(flag: Flag, every_spelling: bool) -> set[str]:
    spellings = flag.names if every_spelling else ()
    return {flag.dest, *(name[2:].replace("-", "_") for name in spellings if name[:2] == "--")}
