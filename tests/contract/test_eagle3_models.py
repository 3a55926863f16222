"""The table of model classes without EAGLE-3 hooks, against the sources of every release."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from by_path import load

from sglang_spec_ext.compat import contracts
from sglang_spec_ext.compat.eagle3_models import ROWS, How, row_of
from sglang_spec_ext.compat.releases import RELEASES

# What the sources look like, by the tool that reads them, and what the table makes of it instead.
READ_OTHERWISE = {
    "MuseGlimmerForCausalLM": "dflash",  # whose setter counts layers by their inputs
    "MuseGlimmerForConditionalGeneration": "dflash",
    "Sarashina2VisionForCausalLM": "delegate",  # it goes past the forward of what it wraps
}
# Classes that stand before another object, of which only run time knows where the language model is
ASKED_AT_RUN_TIME = {
    "MiniCPMV": "?",
    "MiniCPMV4_6ForConditionalGeneration": "?",
    "MiniCPMV4_7ForConditionalGeneration": "?",
    "Mistral3ForConditionalGeneration": "inner",
}
HOPELESS = {"loop", "dspark", "draft", "other", "native"}


tool = load("tools/eagle3_models.py")


@pytest.fixture(scope="session")
def found(wheel_of: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """What a release's sources say about each class, by name."""
    read: dict[str, dict[str, Any]] = {}

    def of(release: str) -> dict[str, Any]:
        if release not in read:
            read[release] = tool.Models.of_wheel(wheel_of(release)).found
        return read[release]

    return of


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_is_complete(release: str, found: Callable[[str], dict[str, Any]]) -> None:
    missing = [
        f"{one.module}.{name}: {one.how} {one.inner} {one.inner_classes}"
        for name, one in found(release).items()
        if one.how not in HOPELESS and row_of(name, release) is None
    ]
    assert missing == []


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_is_not_stale(release: str, found: Callable[[str], dict[str, Any]]) -> None:
    classes = found(release)
    for row in ROWS:
        if not row.covers(release):
            continue
        one = classes.get(row.name)
        assert one is not None, f"{row.name} is no model class of {release}"
        assert one.module == row.module
        assert one.how == READ_OTHERWISE.get(row.name, row.how.name.lower()), row.name
        if row.how is How.DELEGATE and one.inner != row.inner:
            assert one.inner == ASKED_AT_RUN_TIME[row.name]


@pytest.mark.parametrize("release", RELEASES)
def test_no_draft_class_is_in_the_table(
    release: str, found: Callable[[str], dict[str, Any]]
) -> None:
    drafts = {name for name, one in found(release).items() if one.how == "draft"}
    assert drafts, "the reader no longer tells drafts"
    assert not drafts & {row.name for row in ROWS}


@pytest.mark.parametrize("release", RELEASES)
def test_the_load_can_be_wrapped_in_every_release(
    release: str, wheel_of: Callable[[str], Path], tmp_path: Path
) -> None:
    points = contracts.LOADING + contracts.LOADING_CALLED
    with zipfile.ZipFile(wheel_of(release)) as archive:
        for point in points:
            archive.extract(point.module.replace(".", "/") + ".py", tmp_path)
    assert contracts.check(tmp_path, points) == []


def test_one_class_has_one_row_per_release() -> None:
    for release in RELEASES:
        names = [row.name for row in ROWS if row.covers(release)]
        assert len(names) == len(set(names)), release


def test_the_documented_table_is_the_one_that_we_would_write(
    found: Callable[[str], dict[str, Any]],
) -> None:
    text = tool.document({release: found(release) for release in RELEASES}, ROWS)
    assert tool.DOCS.read_text() == text, "run: python tools/eagle3_models.py --docs WHEELS"
