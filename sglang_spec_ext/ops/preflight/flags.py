"""Which flags and environment variables an SGLang release has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_spec_ext.compat.releases import RELEASES, span

TABLE = Path(__file__).with_name("flags.json")  # written by tools/record_sglang_flags.py


@dataclass(frozen=True)
class Flag:
    """One flag as argparse has it. ``nargs`` is None for one value, else argparse's word for it.

    ``kind`` is ``store`` for flags with a value; all others take none.
    """

    names: tuple[str, ...]
    dest: str
    kind: str = "store"
    type: str = "str"
    nargs: str | int | None = None
    choices: tuple[str, ...] = ()
    required: bool = False
    default: Any = None
    deprecated: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def takes_value(self) -> bool:
        return self.kind in ("store", "append")

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Flag:
        values = dict(found)
        for name in ("names", "choices"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)


class FlagTable:
    """The flags of one release. ``origin`` tells where the knowledge comes from."""

    def __init__(self, release: str, flags: Iterable[Flag], origin: str) -> None:
        self.release = release
        self.origin = origin
        self.flags = tuple(flags)
        self._by_name = {name: flag for flag in self.flags for name in flag.names}
        self.by_dest: dict[str, Flag] = {}
        for flag in self.flags:
            self.by_dest.setdefault(flag.dest, flag)

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def find(self, name: str) -> Flag | None:
        return self._by_name.get(name)

    def beginning_with(self, prefix: str) -> list[str]:
        """Names that argparse would take this abbreviation for."""
        return sorted(name for name in self._by_name if name.startswith(prefix))

    def with_flags(self, flags: Iterable[Flag]) -> FlagTable:
        return FlagTable(self.release, [*self.flags, *flags], self.origin)


@cache
def recorded(release: str) -> FlagTable:
    """The recorded table of a release; ``release`` is one of RELEASES."""
    flags = [Flag.from_json(each) for first, last, each in _table()["flags"]
             if release in span(first, last)]  # fmt: skip
    return FlagTable(release, flags, f"recorded from the wheel of SGLang {release}")


def releases_with_flag(name: str) -> list[str]:
    """All recorded releases that know a flag of exactly this name."""
    return _releases(
        (first, last) for first, last, each in _table()["flags"] if name in each["names"]
    )


def releases_with_variable(name: str) -> list[str]:
    """All recorded releases whose code mentions this environment variable."""
    return _releases((first, last) for first, last, each in _table()["variables"] if name == each)


def variables(release: str) -> list[str]:
    """SGLang's own environment variables in a recorded release."""
    return [each for first, last, each in _table()["variables"] if release in span(first, last)]


def _releases(spans: Iterable[tuple[str, str]]) -> list[str]:
    found = {release for first, last in spans for release in span(first, last)}
    return [release for release in RELEASES if release in found]


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table
