"""patches/generate.py on a small fake wheel, read back with tools/apply_patches.py."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from by_path import load

from sglang_spec_ext.compat import contracts, workers

generate = load("patches/generate.py")
tool = load("tools/apply_patches.py")

M = "sglang/m.py"
TEXT = "".join(f"x{i} = {i}\n" for i in range(30)) + "s = '\x0c\u2028'\nlast = 1"
HEAD = {"WHAT": "what " * 40, "WHY": "why", "UPSTREAM": "none", "RETIRE": "never"}


def edit(anchor: str, **action: str) -> dict[str, str]:
    return {"file": M, "anchor": anchor, **action}


class Sources:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "source").mkdir()
        self.wheel = folder / "sglang-9.9.1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(M, TEXT)
            archive.writestr("sglang-9.9.1.dist-info/METADATA", "")

    def write(self, **concerns: list[dict[str, str]]) -> None:
        for name, edits in concerns.items():
            values: dict[str, Any] = {**HEAD, "EDITS": {"9.9.1": edits}}
            text = "".join(f"{key} = {value!r}\n" for key, value in values.items())
            (self.folder / "source" / f"{name}.py").write_text(text)
        (self.folder / "source" / "series").write_text("# order\n" + "\n".join(concerns) + "\n")

    def run(self, *options: str) -> int:
        return int(generate.main(["--patches", str(self.folder), *options]))

    def make(self) -> int:
        return self.run("--wheels", str(self.folder))

    def result(self) -> str:
        """The file after all diffs, by the tool; it also checks every hash."""
        patches = tool.load_patch_set(str(self.folder / "9.9.1"))
        steps = len(patches.chains[M])
        after = patches.transform(M, TEXT.encode(), 0, steps)
        assert patches.transform(M, after, steps, 0) == TEXT.encode()
        return bytes(after).decode()


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path)


def test_edits_become_stacked_diffs(sources: Sources) -> None:
    sources.write(
        first=[
            edit("x20 = 20\nx21 = 21\n", replace="x20 = 20\nx21 = 0\n"),
            edit("x0 = 0\n", insert_before="a = 1\n"),
            edit("x9 = 9\n", insert_after="b = 1\n"),
            edit("x24 = 24\n", replace="c = 1\nd = 1\n"),
        ],
        second=[edit("b = 1\n", replace="b = 2\n"), edit("x29 = 29\n", insert_after="e = 1\n")],
    )
    assert sources.make() == 0
    expected = TEXT.replace("x0 = 0\n", "a = 1\nx0 = 0\n").replace("x9 = 9\n", "x9 = 9\nb = 2\n")
    expected = expected.replace("x21 = 21\n", "x21 = 0\n").replace("x24 = 24\n", "c = 1\nd = 1\n")
    assert sources.result() == expected.replace("x29 = 29\n", "x29 = 29\ne = 1\n")
    diff = (sources.folder / "9.9.1" / "first.diff").read_text()
    assert diff.count("\n@@ ") == 3  # edits that are near share a hunk, others do not
    assert "-x20" not in diff  # an unchanged line of the anchor stays context
    assert (sources.folder / "9.9.1" / "series").read_text() == "first.diff\nsecond.diff\n"


def test_patch_and_git_read_the_diffs_too(sources: Sources) -> None:
    sources.write(one=[edit("x5 = 5\n", insert_after="b = 1\n"), edit("x29 = 29\n", replace="\n")])
    sources.make()
    target = sources.folder / M
    target.parent.mkdir()
    target.write_text(TEXT)
    diff = sources.folder / "9.9.1" / "one.diff"
    subprocess.run(["git", "apply", str(diff)], cwd=sources.folder, check=True)
    assert target.read_text() == sources.result()


def test_is_deterministic_and_checkable(sources: Sources) -> None:
    sources.write(one=[edit("x5 = 5\n", insert_after="b = 1\n")])
    check = ("--check", "--wheels", str(sources.folder))
    assert sources.run(*check) == 1
    assert not (sources.folder / "9.9.1").exists()
    sources.make()
    diff = sources.folder / "9.9.1" / "one.diff"
    first = diff.read_bytes()
    assert sources.run(*check) == 0
    sources.make()
    assert diff.read_bytes() == first
    diff.write_bytes(first + b"\n")
    assert sources.run(*check) == 1
    assert sources.make() == 0 and diff.read_bytes() == first


def test_removes_what_no_source_gives_any_more(sources: Sources) -> None:
    sources.write(one=[edit("x5 = 5\n", insert_after="b = 1\n")])
    sources.make()
    old = sources.folder / "9.9.0"
    old.mkdir()
    (old / "series").write_text("gone.diff\n")
    (sources.folder / "9.9.1" / "gone.diff").write_text("")
    assert sources.run("--check", "--wheels", str(sources.folder)) == 1
    assert old.exists()
    sources.make()
    assert not old.exists()
    assert sorted(p.name for p in (sources.folder / "9.9.1").iterdir()) == ["one.diff", "series"]


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([edit("x = 5\n", insert_after="b\n")], "occurs 0 times"),
        ([edit("5 = 5\n", insert_after="b\n")], "occurs 0 times"),  # not a whole line
        ([edit("x5 = 5", insert_after="b\n")], "anchor must end with a newline"),
        ([edit("x5 = 5\n", insert_after="b")], "insert_after must end with a newline"),
        ([edit("x5 = 5\n")], "one of insert_before"),
        ([edit("x5 = 5\n", insert_after="b\n", replace="c\n")], "one of insert_before"),
        ([edit("x5 = 5\n", insert_after="a=1\n"), edit("x5 = 5\n", replace="c=1\n")], None),
        (
            [edit("x5 = 5\n", insert_after="a\n"), edit("x6 = 6\n", insert_before="c\n")],
            "overlap",
        ),
        ([edit("x5 = 5\nx6 = 6\n", replace="a\n"), edit("x6 = 6\n", replace="c\n")], "overlap"),
        ([{**edit("x5 = 5\n", replace="a\n"), "file": "sglang/n.py"}], "not in the wheel"),
    ],
)
def test_edits_that_do_not_fit(
    sources: Sources,
    capsys: pytest.CaptureFixture[str],
    edits: list[dict[str, str]],
    expected: str | None,
) -> None:
    sources.write(one=edits)
    code = sources.make()
    message = capsys.readouterr().err
    if expected is None:
        assert (code, message) == (0, "")
    else:
        assert code == 2 and expected in message
        assert not (sources.folder / "9.9.1").exists()


def test_anchor_must_be_unique(sources: Sources, capsys: pytest.CaptureFixture[str]) -> None:
    sources.write(
        one=[edit("x5 = 5\n", insert_after="x6 = 6\n")], two=[edit("x6 = 6\n", insert_after="a\n")]
    )
    assert sources.make() == 2
    assert "two, 9.9.1, sglang/m.py: the anchor occurs 2 times" in capsys.readouterr().err


def test_result_must_compile(sources: Sources) -> None:
    sources.write(one=[edit("x5 = 5\n", insert_after="this is no python\n")])
    with pytest.raises(SyntaxError):
        sources.make()


def test_wrong_wheel_unknown_release_and_unlisted_concern(
    sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    sources.write(one=[edit("x5 = 5\n", insert_after="b = 1\n")])
    other = sources.folder / "sglang-9.9.2-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("sglang-9.9.2.dist-info/METADATA", "")
    assert sources.run("--release", "9.9.1", "--wheel", str(other)) == 2
    assert "is not the wheel of sglang 9.9.1" in capsys.readouterr().err
    assert sources.run("--release", "8.8.8") == 2
    assert "8.8.8" in capsys.readouterr().err
    (sources.folder / "source" / "extra.py").write_text("")
    assert sources.make() == 2
    assert "does not name extra" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ seams

S = "sglang/srt/server_args.py"
SEAMLESS = """\
from __future__ import annotations

import os

from sglang.srt import things


class Thing:
    made: type = dict  # a word

    @staticmethod
    def static(parser):
        def method():
            pass

    @classmethod
    @other(
        1,
    )
    def made_by(cls):
        pass

    async def method(self):
        pass


def method():
    pass
"""
SEAMED = """\
from __future__ import annotations

import os

from sglang_spec_ext.seams import seam
from sglang.srt import things


class Thing:
    made: type = seam(dict)  # a word

    @staticmethod
    @seam
    def static(parser):
        def method():
            pass

    @classmethod
    @seam
    @other(
        1,
    )
    def made_by(cls):
        pass

    @seam
    async def method(self):
        pass


@seam
def method():
    pass
"""
QUALNAMES = ["method", "Thing.static", "Thing.made", "Thing.method", "Thing.made_by"]


def seamed(text: str, qualnames: list[str]) -> str:
    spans = sorted(generate.seam_spans(text, qualnames))
    return "".join(generate.apply_spans(generate.lines_of(text), spans))


def test_seams_go_where_a_hook_would_wrap() -> None:
    assert seamed(SEAMLESS, QUALNAMES) == SEAMED
    # a second concern on the same file finds the import
    assert seamed(seamed(SEAMLESS, QUALNAMES[:2]), QUALNAMES[2:]) == SEAMED


def test_a_seam_needs_a_definition() -> None:
    for name in ("Thing.gone", "gone"):
        with pytest.raises(generate.SourceError, match="has no definition of its own"):
            seamed(SEAMLESS, [name])


def test_the_contract_sees_the_seams(tmp_path: Path) -> None:
    for folder, text, expected in (("before", SEAMLESS, False), ("after", SEAMED, True)):
        site = tmp_path / folder
        file = site / "sglang" / "thing.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        for name, kind in {
            "method": "function",
            "Thing.static": "staticmethod",
            "Thing.made": "attribute",
            "Thing.method": "method",
            "Thing.made_by": "classmethod",
        }.items():
            point = contracts.TouchPoint(name, "sglang.thing", name, kind, None, "launcher", "")
            assert contracts.gap(point, site) is None
            assert contracts.seamed(point, site) is expected
            assert not contracts.seamed(point, tmp_path / "nowhere")


@pytest.fixture
def seam_sources(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """A release in which two functions of one file are hooked."""
    server_args = "sglang.srt.server_args"
    points = [
        contracts.TouchPoint(name, server_args, qualname, "method", None, "launcher", "")
        for name, qualname in (("add_cli_args", "Thing.method"), ("from_cli_args", "method"))
    ]
    monkeypatch.setattr(workers, "hooked", lambda site: tuple(points))
    with zipfile.ZipFile(sources.wheel, "a") as archive:
        archive.writestr(S, SEAMLESS)
    (sources.folder / "source" / "releases").write_text("# these\n9.9.1\n")
    return sources


def write_seams(sources: Sources, **concerns: tuple[str, ...]) -> None:
    sources.write(**{name: [] for name in concerns})
    for name, seams in concerns.items():
        file = sources.folder / "source" / f"{name}.py"
        file.write_text(file.read_text() + f"SEAMS = {seams!r}\nEDITS = {{}}\n")


def test_concerns_name_touch_points(seam_sources: Sources) -> None:
    # a touch point that this release does not hook is another release's
    names = {
        "one": ("from_cli_args", "init_info"),
        "two": ("add_cli_args",),
        "none": ("load_model",),
    }
    write_seams(seam_sources, **names)
    assert seam_sources.make() == 0
    made = seam_sources.folder / "9.9.1"
    assert (made / "series").read_text() == "one.diff\ntwo.diff\n"
    patches = tool.load_patch_set(str(made))
    after = patches.transform(S, SEAMLESS.encode(), 0, 2).decode()
    assert after == seamed(SEAMLESS, ["Thing.method", "method"])


@pytest.mark.parametrize(
    ("seams", "expected"),
    [
        (("add_cli_args",), "touch point from_cli_args is in 0 concerns, not in one"),
        (("add_cli_args", "from_cli_args", "from_cli_args"), "from_cli_args is in 2 concerns"),
        (("add_cli_args", "from_cli_args", "add_flags"), "there is no touch point add_flags"),
    ],
)
def test_all_that_is_hooked_is_in_one_concern(
    seam_sources: Sources,
    capsys: pytest.CaptureFixture[str],
    seams: tuple[str, ...],
    expected: str,
) -> None:
    write_seams(seam_sources, one=seams)
    assert seam_sources.make() == 2
    assert expected in capsys.readouterr().err


def test_a_concern_without_anything_to_do(
    sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    write_seams(sources, one=())
    assert sources.make() == 2
    assert "one.py does not define SEAMS or EDITS" in capsys.readouterr().err
