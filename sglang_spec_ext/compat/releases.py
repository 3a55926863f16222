"""The SGLang releases that we know, their order, and how a message names some of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata

RELEASES = (
    "0.5.9",
    "0.5.10.post1",
    "0.5.11",
    "0.5.12.post1",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)


def span(first: str = RELEASES[0], last: str = RELEASES[-1]) -> tuple[str, ...]:
    """All releases from ``first`` to ``last``, both included."""
    return RELEASES[RELEASES.index(first) : RELEASES.index(last) + 1]


def before(release: str) -> tuple[str, ...]:
    """All releases older than ``release``."""
    return RELEASES[: RELEASES.index(release)]


def describe(releases: Iterable[str]) -> str:
    """``0.5.9-0.5.11, 0.5.14`` for a set of releases; empty when it is all of them."""
    places = sorted(RELEASES.index(release) for release in releases)
    if len(places) == len(RELEASES):
        return ""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return ", ".join(
        RELEASES[first] if first == last else f"{RELEASES[first]}-{RELEASES[last]}"
        for first, last in runs
    )


def nearest(version: str) -> tuple[str, bool]:
    """The release whose rules apply to ``version``, and whether its loaders were read.

    A post release or a development build counts as its release; anything newer than the newest
    known release is judged by that one. Raises ValueError for what is older or no version.
    """
    parts = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if parts is None:
        raise ValueError(f"{version!r} is no SGLang version, expected for example {RELEASES[-1]}")
    wanted = tuple(int(part) for part in parts.groups())
    known = {_numbers(release): release for release in RELEASES}
    if wanted in known:
        return known[wanted], True
    if wanted < min(known):
        raise ValueError(f"SGLang {version} is older than the oldest known release {RELEASES[0]}")
    return known[max(numbers for numbers in known if numbers < wanted)], False


def installed_version() -> str | None:
    """The version of SGLang beside us; None where there is none (SGLang is not imported)."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:3])
