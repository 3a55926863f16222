"""tools/apply_patches.py on small fake trees: every state, every refusal, every kind of crash."""

from __future__ import annotations

import ast
import contextlib
import difflib
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import py_compile
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from by_path import ROOT, load

TOOL = ROOT / "tools" / "apply_patches.py"
tool = load("tools/apply_patches.py")

# ------------------------------------------------------------------------------- a fake world

A, B, C = "sglang/srt/a.py", "sglang/srt/models/b.py", "sglang/srt/c.py"
PRISTINE = {
    A: "".join(f"a{i} = {i}\n" for i in range(40)),
    B: "class B:\n    pass\n" + "# filler\n" * 400 + "last = 1",  # no newline at the end
    C: "c = 1\r\nd = 2\r\n'\re'\n",  # carriage returns are content
}
AFTER_ONE = {
    A: PRISTINE[A].replace("a3 = 3\n", "a3 = 33\na_new = 1\n").replace("a30 = 30\n", ""),
    B: PRISTINE[B].replace("    pass\n", "    x = 1\n").replace("last = 1", "last = 2"),
}
AFTER_TWO = {A: AFTER_ONE[A].replace("a3 = 33\n", "a3 = 333\n")}
AFTER_THREE = {C: PRISTINE[C].replace("d = 2\r\n", "d = 22\r\n")}
APPLIED = {**AFTER_ONE, **AFTER_TWO, **AFTER_THREE}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def lines_of(text: str) -> list[str]:
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [text.split("\n")[-1]] * (
        not text.endswith("\n")
    )


def make_diff(release: str, before: dict[str, str], after: dict[str, str]) -> str:
    header = f"Release: {release}\nWhat: a test\nWhy: to test\n on two lines\n"
    header += "Upstream: none\nRetire: never\n"
    body = ""
    for path in after:
        header += f"Before: sha256:{sha(before[path])} {path}\n"
        header += f"After: sha256:{sha(after[path])} {path}\n"
        diff = difflib.unified_diff(
            lines_of(before[path]), lines_of(after[path]), f"a/{path}", f"b/{path}"
        )
        for line in diff:
            body += line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    return f"{header}\n{body}"


def write_patches(folder: Path) -> None:
    for release, diffs in {
        "9.9.1": {
            "one": (PRISTINE, AFTER_ONE),
            "two": ({**PRISTINE, **AFTER_ONE}, AFTER_TWO),
            "three": (PRISTINE, AFTER_THREE),
        },
        "9.9.2": {"three": ({C: "c = 'of 9.9.2'\n"}, {C: "c = 'ours'\n"})},
    }.items():
        (folder / release).mkdir(parents=True)
        for name, (before, after) in diffs.items():
            text = make_diff(release, before, after)
            (folder / release / f"{name}.diff").write_bytes(text.encode())
        series = "# in order\n" + "".join(f"{name}.diff\n" for name in diffs)
        (folder / release / "series").write_text(series)


def write_tree(root: Path, files: dict[str, str], version: str | None = "9.9.1") -> None:
    for path, text in {"sglang/__init__.py": "raise ImportError\n", **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode())
    if version:
        (root / "sglang/_version.py").write_text(f"__version__ = version = '{version}'\n")


class World:
    """A site-packages folder, a patches folder, and the tool run on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site-packages"
        self.patches = folder / "patches"
        write_patches(self.patches)
        write_tree(self.site, PRISTINE)

    def path(self, name: str) -> Path:
        return self.site / name

    def argv(self, command: str, *options: str) -> list[str]:
        site = () if "--site" in options else ("--site", str(self.site))
        return [command, "--patches", str(self.patches), *site, "--json", *options]

    def run(self, command: str, *options: str) -> dict[str, Any]:
        """The report of one command."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), mock.patch("os.fsync"):
            code = tool.main(self.argv(command, *options))
        report = json.loads(out.getvalue())
        assert code == report["exit"]
        return dict(report)

    def child(self, body: Callable[[], int], out: int | None = None) -> int:
        """Wait status of `body` in a forked child; its return value is the exit status."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                target = os.open(os.devnull, os.O_WRONLY) if out is None else out
                os.dup2(target, 1)
                sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
                os.fsync = mock.Mock()  # a killed process loses no page cache; saves minutes
                code = body()
                sys.stdout.flush()
            finally:
                os._exit(code)
        return os.waitpid(pid, 0)[1]

    def states(self, *options: str) -> dict[str, str]:
        files = self.run("status", *options)["files"]
        return {path: file["state"] for path, file in files.items()}

    def snapshot(self) -> dict[str, tuple[bytes, int]]:
        files = sorted(path for path in self.site.rglob("*") if path.is_file())
        return {
            str(path.relative_to(self.site)): (path.read_bytes(), path.stat().st_mode)
            for path in files
        }

    def expect(self, files: dict[str, str]) -> None:
        """The tree holds exactly these contents and not a file more than it began with."""
        found = {path: data.decode() for path, (data, _) in self.snapshot().items()}
        extra = {path for path in found if path not in PRISTINE}
        assert extra == {"sglang/__init__.py", "sglang/_version.py"}
        assert {path: found[path] for path in PRISTINE} == {**PRISTINE, **files}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def error(report: dict[str, Any]) -> tuple[int, str]:
    return report["exit"], report.get("error", {}).get("message", "")


# ------------------------------------------------------------------------------- the good case


def test_apply_verify_revert_restores_every_byte(world: World) -> None:
    before = world.snapshot()
    assert world.states() == {A: "pristine", B: "pristine", C: "pristine"}
    assert world.run("verify")["exit"] == 1

    report = world.run("apply")
    assert report["exit"] == 0 and sorted(report["changed"]) == [A, C, B]
    world.expect(APPLIED)
    assert world.states() == {A: "applied", B: "applied", C: "applied"}
    assert world.run("verify")["exit"] == 0

    assert world.run("revert")["exit"] == 0
    assert world.snapshot() == before


def test_second_apply_touches_nothing(world: World) -> None:
    world.run("apply")
    before = {p: world.path(p).stat() for p in (*PRISTINE, "sglang", "sglang/srt")}
    report = world.run("apply")
    assert (report["exit"], report["changed"]) == (0, [])
    for path, old in before.items():
        new = world.path(path).stat()
        assert (new.st_ino, new.st_mtime_ns) == (old.st_ino, old.st_mtime_ns)


def test_revert_of_a_pristine_tree_is_a_no_op(world: World) -> None:
    assert world.run("revert")["changed"] == []
    world.expect({})


@pytest.mark.parametrize(("first", "command"), [("revert", "apply"), ("apply", "revert")])
def test_dry_run_says_what_it_would_do_and_writes_nothing(
    world: World, first: str, command: str
) -> None:
    world.run(first)
    before = world.snapshot()
    report = world.run(command, "--dry-run")
    assert report["exit"] == 0 and sorted(report["changed"]) == [A, C, B]
    assert world.snapshot() == before


def test_text_output_names_release_states_and_restart(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--patches", str(world.patches), "--site", str(world.site)]
    assert tool.main(["status", *argv]) == 0
    out = capsys.readouterr().out
    assert "sglang 9.9.1" in out and f"{A}: pristine" in out and "a test" in out
    assert tool.main(["apply", *argv]) == 0
    assert "restart" in capsys.readouterr().out
    world.path(A).write_text("foreign\n")
    assert tool.main(["apply", *argv]) == 4
    assert "error: wrong base" in capsys.readouterr().err


# ------------------------------------------------------------------------------- states


def test_file_between_two_diffs_is_partly_applied_and_completed(world: World) -> None:
    world.path(A).write_text(AFTER_ONE[A])
    report = world.run("status")
    assert report["files"][A] == {"state": "partly applied", "detail": "has one"}
    assert report["concerns"] == {"one": "partly applied", "two": "pristine", "three": "pristine"}
    assert world.run("apply")["exit"] == 0
    world.expect(APPLIED)


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_foreign_change_blocks_everything(world: World, command: str) -> None:
    world.run("apply" if command == "revert" else "revert")
    world.path(C).write_text(world.path(C).read_text() + "# someone else's line\n")
    before = world.snapshot()
    assert world.states()[C] == "changed by others"
    code, message = error(world.run(command))
    assert code == 4 and message.startswith("wrong base")
    assert C in message and "sglang==9.9.1" in message
    assert world.snapshot() == before
    assert world.run("verify")["exit"] == 1


def test_foreign_change_outside_the_selection_does_not_block(world: World) -> None:
    world.path(C).write_text("foreign\n")
    assert world.run("apply", "--only", "one")["exit"] == 0
    assert world.path(C).read_text() == "foreign\n"


def test_missing_file_is_a_foreign_change(world: World) -> None:
    world.path(C).unlink()
    code, message = error(world.run("apply"))
    assert code == 4 and "file is missing" in message
    assert world.path(A).read_text() == PRISTINE[A]


def test_another_releases_file_is_named(world: World) -> None:
    world.path(C).write_text("c = 'of 9.9.2'\n")
    report = world.run("status")
    assert report["files"][C]["state"] == "not this release"
    assert "9.9.2" in report["files"][C]["detail"]
    assert world.run("apply")["exit"] == 4


def test_unknown_hash_under_another_version_is_not_this_release(world: World) -> None:
    write_tree(world.site, {C: "c = 'of 9.9.7'\n"}, version="9.9.7")
    assert world.states("--release", "9.9.1")[C] == "not this release"
    assert world.run("apply", "--release", "9.9.1")["exit"] == 4


def test_release_without_patches_is_a_wrong_base(world: World) -> None:
    write_tree(world.site, dict.fromkeys(PRISTINE, "other\n"), version="9.9.7")
    code, message = error(world.run("apply"))
    assert code == 4 and "no patches for SGLang 9.9.7" in message and "9.9.1, 9.9.2" in message


def test_a_folder_of_sources_is_no_release(world: World) -> None:
    """As in the repository, where the diffs are made from `source/`, which has a series too."""
    (world.patches / "source").mkdir()
    (world.patches / "source" / "series").write_text("kimi_k25\n")
    write_tree(world.site, dict.fromkeys(PRISTINE, "other\n"), version="9.9.7")
    code, message = error(world.run("apply"))
    assert code == 4 and message.endswith("there are patches for: 9.9.1, 9.9.2")


def test_release_is_found_by_hash_when_the_version_says_nothing(world: World) -> None:
    world.path("sglang/_version.py").unlink()
    report = world.run("status")
    assert (report["site"]["version"], report["release"]) == (None, "9.9.1")


def test_two_fitting_releases_need_a_choice(world: World) -> None:
    world.path("sglang/_version.py").unlink()
    shutil.copytree(world.patches / "9.9.1", world.patches / "9.9.3")
    for diff in (world.patches / "9.9.3").glob("*.diff"):
        diff.write_bytes(diff.read_bytes().replace(b"Release: 9.9.1", b"Release: 9.9.3"))
    code, message = error(world.run("apply"))
    assert code == 2 and "9.9.1, 9.9.3" in message
    assert world.run("apply", "--release", "9.9.3")["exit"] == 0


def test_version_is_read_from_dist_info(world: World) -> None:
    world.path("sglang/_version.py").unlink()
    world.path("sglang-9.9.1.dist-info").mkdir()
    assert world.run("status")["site"]["version"] == "9.9.1"


# ------------------------------------------------------------------------------- --only


def test_only_selects_concerns_in_series_order(world: World) -> None:
    assert world.run("apply", "--only", "two,one")["concerns"] == {
        "one": "applied",
        "two": "applied",
    }
    world.expect({**AFTER_ONE, **AFTER_TWO})
    assert world.run("verify")["exit"] == 1
    assert world.run("verify", "--only", "one", "--only", "two")["exit"] == 0


def test_only_refuses_to_skip_a_diff_that_another_builds_on(world: World) -> None:
    code, message = error(world.run("apply", "--only", "two"))
    assert code == 2 and f"two builds on one in {A}; use --only one,two" in message
    world.expect({})
    world.run("apply", "--only", "one")
    assert world.run("apply", "--only", "two")["exit"] == 0

    code, message = error(world.run("revert", "--only", "one"))
    assert code == 2 and f"one is built on by two in {A}; use --only one,two" in message
    world.expect({**AFTER_ONE, **AFTER_TWO})
    assert world.run("revert", "--only", "two")["exit"] == 0
    world.expect(AFTER_ONE)


def test_only_of_an_applied_lower_diff_is_a_no_op(world: World) -> None:
    world.run("apply")
    assert world.run("apply", "--only", "one")["changed"] == []
    world.expect(APPLIED)


def test_only_names_what_there_is(world: World) -> None:
    code, message = error(world.run("apply", "--only", "won"))
    assert code == 2 and "won" in message and "one, two, three" in message
    assert world.run("apply", "--only", ",")["exit"] == 2


# ------------------------------------------------------------------------------- malformed sets


def edit_diff(world: World, old: str, new: str, name: str = "one") -> None:
    path = world.patches / "9.9.1" / f"{name}.diff"
    text = path.read_bytes().decode()
    assert old in text
    path.write_bytes(text.replace(old, new, 1).encode())


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("Why: to test\n on two lines\n", "", "lacks Why"),
        ("What: a test\n", "What a test\n", "expected 'Field: text'"),
        ("Before: sha256:", "Before: md5:", "expected 'Before: sha256:"),
        (f"After: sha256:{sha(AFTER_ONE[A])} {A}\n", "", "no Before and After"),
        (f"--- a/{A}\n", f"--- a/python/{A}\n", "creates, deletes or renames"),
        (f"--- a/{A}\n+++ b/{A}\n", f"--- {A}\n+++ {A}\n", "expected '--- a/<path>'"),
        (f"--- a/{A}\n+++ b/{A}\n", "--- a/x/a.py\n+++ b/x/a.py\n", "must be inside sglang/"),
        (f"+++ b/{A}\n@@ -1,7 ", f"+++ b/{A}\n@@ -1,9 ", "malformed diff"),
        (f"+++ b/{A}\n@@ ", f"+++ b/{A}\n@ ", "no hunk"),
        ("+a_new = 1\n", "", "malformed diff"),
        ("+a_new = 1\n", "a_new = 1\n", "starts with ' ', '-' or '+'"),
        (" a0 = 0\n", "\n", "lost its leading space"),
        (" a0 = 0\n", " a0 = 00\n", "does not fit"),
        ("+a_new = 1\n", "+a_new = 2\n", "do not give the hash"),
        ("+    x = 1\n", "+    x = 1\n\n", "malformed diff"),
    ],
)
def test_malformed_diff_is_told_apart_and_changes_nothing(
    world: World, old: str, new: str, expected: str
) -> None:
    edit_diff(world, old, new)
    code, message = error(world.run("apply"))
    assert code == 3 and message.startswith("malformed diff: ") and "one.diff" in message
    assert expected in message
    world.expect({})


def test_truncated_and_text_mode_copies_are_malformed(world: World) -> None:
    path = world.patches / "9.9.1" / "one.diff"
    whole = path.read_bytes()
    for size in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:size])
        assert world.run("status")["exit"] == 3, size
    path.write_bytes(whole.replace(b"\n", b"\r\n"))
    assert "CR LF" in error(world.run("status"))[1]
    path.unlink()
    assert "copy the whole patches folder" in error(world.run("status"))[1]


def test_parent_paths_are_refused(world: World) -> None:
    text = (world.patches / "9.9.1" / "three.diff").read_bytes().decode()
    evil = text.replace(C, "sglang/../../c.py")
    (world.patches / "9.9.1" / "three.diff").write_bytes(evil.encode())
    assert "must be inside sglang/" in error(world.run("apply"))[1]


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ("two.diff\none.diff\n", "does not start from what two makes of"),
        ("one.diff\none.diff\n", "appears twice"),
        ("../9.9.2/three.diff\n", "not a diff"),
        ("# nothing\n", "names no diff"),
    ],
)
def test_broken_series_is_malformed(world: World, series: str, expected: str) -> None:
    (world.patches / "9.9.1" / "series").write_text(series)
    code, message = error(world.run("apply"))
    assert code == 3 and message.startswith("malformed patch set: ") and expected in message


def test_diff_in_the_wrong_folder_is_malformed(world: World) -> None:
    shutil.copy(world.patches / "9.9.2/three.diff", world.patches / "9.9.1/three.diff")
    assert "is for release 9.9.2, not 9.9.1" in error(world.run("apply"))[1]


def test_no_patches_folder(world: World) -> None:
    code, message = error(world.run("status", "--patches", str(world.site)))
    assert code == 2 and "--patches" in message


# ------------------------------------------------------------------------------- sites


@pytest.mark.parametrize("prefix", ["lib/python3.11/site-packages", "lib/python3/dist-packages"])
def test_site_may_be_an_environment(world: World, prefix: str) -> None:
    write_tree(world.folder / "env" / prefix, PRISTINE)
    report = world.run("apply", "--site", str(world.folder / "env"))
    assert report["site"]["package"] == str(world.folder / "env" / prefix / "sglang")


def test_site_may_be_a_checkout_or_the_package(world: World) -> None:
    checkout = world.folder / "sglang"
    write_tree(checkout / "python", PRISTINE, version=None)
    for option in (checkout, checkout / "python", checkout / "python" / "sglang"):
        report = world.run("apply", "--site", str(option))
        assert report["site"]["package"] == str(checkout / "python" / "sglang")
        assert (checkout / "python" / A).read_text() == APPLIED[A]
        assert world.run("revert", "--site", str(option))["exit"] == 0
        assert (checkout / "python" / A).read_text() == PRISTINE[A]


def test_wrong_root_is_told_apart(world: World) -> None:
    code, message = error(world.run("apply", "--site", str(world.patches)))
    assert code == 5 and message.startswith("wrong root")


def test_environment_with_two_pythons_needs_a_choice(world: World) -> None:
    for version in ("3.10", "3.11"):
        write_tree(world.folder / f"env/lib/python{version}/site-packages", PRISTINE)
    code, message = error(world.run("apply", "--site", str(world.folder / "env")))
    assert code == 5 and message.count("--site ") == 2 and "python3.10" in message


def run_fresh(
    world: World, *python: str, path: list[Path], cwd: Path | None = None
) -> dict[str, Any]:
    """`status` by a new interpreter that sees nothing but `path`, without --site."""
    env = {"PYTHONPATH": os.pathsep.join(map(str, path)), "PATH": ""}
    command = [sys.executable, "-S", *(python or [str(TOOL)])]
    command += ["status", "--patches", str(world.patches), "--json"]
    done = subprocess.run(
        command, env=env, cwd=cwd or world.folder, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["exit"] == done.returncode
    return dict(report)


def test_autodetects_what_the_interpreter_imports_without_importing_it(world: World) -> None:
    report = run_fresh(world, path=[world.site])  # importing it would raise
    assert report["exit"] == 0
    assert report["site"]["package"] == str(world.site / "sglang")
    assert report["site"]["how"] == f"imported by {sys.executable}"


def test_autodetects_an_editable_install(world: World) -> None:
    checkout = world.folder / "checkout" / "python"
    write_tree(checkout, PRISTINE, version=None)
    finder = f"""
import importlib.util, runpy, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "sglang":
            init = {str(checkout)!r} + "/sglang/__init__.py"
            return importlib.util.spec_from_file_location(name, init)
sys.meta_path.append(Finder)
sys.argv[0] = {str(TOOL)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    report = run_fresh(world, "-c", finder, path=[])
    assert report["exit"] == 0 and report["site"]["package"] == str(checkout / "sglang")


def test_broken_foreign_finder_does_not_hide_sglang(world: World) -> None:
    finder = f"""
import runpy, sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "sglang":
            raise RuntimeError("broken")
sys.meta_path.insert(0, Finder)
sys.argv[0] = {str(TOOL)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    assert run_fresh(world, "-c", finder, path=[world.site])["exit"] == 0


def test_several_sglang_need_a_choice(world: World) -> None:
    write_tree(world.folder / "other", PRISTINE)
    code, message = error(run_fresh(world, path=[world.site, world.folder / "other"]))
    assert code == 5 and message.startswith("several sglang")
    assert f"--site {world.site}/sglang  (9.9.1, imported by" in message
    assert f"--site {world.folder}/other/sglang  (9.9.1, on sys.path, shadowed)" in message
    code, message = error(run_fresh(world, path=[world.site], cwd=world.folder / "other"))
    assert code == 5 and "in this folder" in message


def test_one_sglang_seen_twice_through_a_link_is_one(world: World) -> None:
    (world.folder / "lib64").symlink_to(world.site)
    report = run_fresh(world, path=[world.folder / "lib64", world.site])
    assert report["exit"] == 0 and report["site"]["package"] == str(world.site / "sglang")


def test_no_sglang_is_a_wrong_root(world: World) -> None:
    code, message = error(run_fresh(world, path=[]))
    assert code == 5 and message.startswith("wrong root") and "--site" in message


def test_symlinked_site_packages_are_followed_and_named(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    link = world.folder / "link"
    link.symlink_to(world.site)
    assert tool.main(["apply", "--patches", str(world.patches), "--site", str(link)]) == 0
    assert f"links lead to {world.site}/sglang" in capsys.readouterr().out
    assert link.is_symlink()
    world.expect(APPLIED)


# ------------------------------------------------------------------------------- files


def test_keeps_mode_and_owner(world: World) -> None:
    world.path(A).chmod(0o751)
    world.path(B).chmod(0o600)
    if os.geteuid() == 0:
        os.chown(world.path(A), 1234, 2345)
    before = world.path(A).stat()
    for command in ("apply", "revert"):
        world.run(command)
        after = world.path(A).stat()
        assert (after.st_mode, after.st_uid, after.st_gid) == (
            before.st_mode,
            before.st_uid,
            before.st_gid,
        )
        assert stat.S_IMODE(world.path(B).stat().st_mode) == 0o600


def test_never_writes_through_a_hard_link(world: World) -> None:
    twin = world.folder / "uv-cache-a.py"
    os.link(world.path(A), twin)
    assert world.run("apply")["exit"] == 0
    assert twin.read_text() == PRISTINE[A] and twin.stat().st_nlink == 1
    assert world.run("revert")["exit"] == 0
    world.expect({})


@pytest.mark.parametrize("linked", [A, "sglang/srt/models"])
def test_refuses_links_inside_the_package(world: World, linked: str) -> None:
    elsewhere = world.folder / "elsewhere"
    world.path(linked).rename(elsewhere)
    world.path(linked).symlink_to(elsewhere)
    before = world.snapshot()
    code, message = error(world.run("apply"))
    assert code == 7 and str(elsewhere) in message and "nothing was changed" in message
    assert world.run("apply", "--dry-run")["exit"] == 7
    assert world.snapshot() == before and world.path(linked).is_symlink()


def test_refuses_read_only_files_even_as_root(world: World) -> None:
    world.path(C).chmod(0o444)
    before = world.snapshot()
    code, message = error(world.run("apply"))
    assert code == 7 and f"{C} is read-only (mode 0444)" in message
    assert world.snapshot() == before


def test_folder_that_the_user_may_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user if the tests run as root, who may write anywhere."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        world = World(Path(name))
        world.path("sglang/srt/models").chmod(0o555)

        def body() -> int:
            if os.geteuid() == 0:
                for path in [world.site, *world.site.rglob("*")]:
                    os.chown(path, 65534, 65534)
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            return int(tool.main(world.argv("apply")))

        assert os.WEXITSTATUS(world.child(body)) == 7
        world.expect({})
        world.path("sglang/srt/models").chmod(0o755)


def test_removes_the_bytecode_of_changed_files_only(world: World) -> None:
    cache = world.path("sglang/srt/__pycache__")
    cache.mkdir()
    names = ["a.cpython-311.pyc", "a.cpython-310.opt-1.pyc", "aa.cpython-311.pyc"]
    for name in names:
        (cache / name).write_bytes(b"old")
    world.run("apply")
    assert [path.name for path in cache.iterdir()] == ["aa.cpython-311.pyc"]


def test_verify_finds_bytecode_that_hides_the_source(world: World) -> None:
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    source = world.path(A)
    cached = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(str(source), invalidation_mode=unchecked)
    stale = cached.read_bytes()
    world.run("apply")
    assert not cached.exists()
    py_compile.compile(str(source), invalidation_mode=unchecked)
    assert world.run("verify")["exit"] == 0
    cached.write_bytes(stale)
    report = world.run("verify")
    assert report["exit"] == 1 and report["problems"] == [f"{cached} hides the source; remove it"]


# ------------------------------------------------------------------------------- two runs


@contextlib.contextmanager
def running(world: World) -> Iterator[None]:
    """Another run of the tool that holds the lock, with its record written."""
    journal = world.path(f"sglang/{tool.JOURNAL_NAME}")
    record = {"format": 1, "action": "apply", "concerns": ["one"], "files": [], "run": "ab"}
    with open(journal, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({**record, "host": "box", "pid": 4321}) + "\n")
        file.flush()
        yield
        journal.unlink()


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_refuses_while_another_run_is_alive(world: World, command: str) -> None:
    with running(world):
        code, message = error(world.run(command))
        assert code == 6 and "pid 4321 on box" in message
        assert "in progress" in world.run("status")["pending"]
        assert world.run("verify")["exit"] == 1
    world.expect({})
    assert world.run(command)["exit"] == 0


# ------------------------------------------------------------------------------- crashes

WRITING = ("open", "write", "fsync", "fchown", "fchmod", "utime", "replace", "unlink", "ftruncate")


def at_step(step: int, act: Callable[[str, Any, tuple[Any, ...]], Any]) -> Callable[[], int]:
    """Patch this process: the `step`-th call that can change the disk does `act` instead.

    Returns the number of such calls so far.
    """
    calls = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                return act(name, real, args)
            return real(*args, **kwargs)

        setattr(os, name, wrapped)

    for name in WRITING:
        wrap(name)
    return lambda: calls


def die(name: str, real: Any, args: tuple[Any, ...]) -> None:
    if name == "write":
        real(args[0], bytes(args[1])[: len(args[1]) // 2])  # torn
    os.kill(os.getpid(), signal.SIGKILL)


def crash(world: World, step: int, command: str) -> bool:
    """Kill -9 `command` at its step; False if it has fewer steps."""

    def body() -> int:
        at_step(step, die)
        return int(tool.main(world.argv(command)))

    status = world.child(body)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def reset(world: World, command: str) -> None:
    shutil.rmtree(world.site)
    write_tree(world.site, APPLIED if command == "revert" else PRISTINE)


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("settle", ["apply", "revert"])
def test_killed_at_any_step_is_settled_by_the_next_run(
    world: World, command: str, settle: str
) -> None:
    recovered = set()
    step = 0
    while True:
        step += 1
        reset(world, command)
        if not crash(world, step, command):
            break
        for path in PRISTINE:
            assert world.path(path).read_bytes().decode() in (PRISTINE[path], APPLIED[path]), step
        status = world.run("status")
        assert status["exit"] == 0
        if status["pending"]:
            assert "interrupted" in status["pending"]
            before = world.snapshot()
            assert world.run("verify")["exit"] == 1
            assert world.run(settle, "--dry-run")["exit"] == 0
            assert world.snapshot() == before  # reading settles nothing
        report = world.run(settle)
        assert report["exit"] == 0, (step, report)
        recovered.add(report.get("recovered", "").split(" ")[0])
        world.expect(APPLIED if settle == "apply" else {})
    assert step > 30
    assert recovered == {"", "undid", "finished"}


def test_killed_while_it_recovers(world: World) -> None:
    first = half_applied(world)
    for settle in ("apply", "revert"):
        step = 0
        while True:
            step += 1
            reset(world, "apply")
            assert crash(world, first, "apply")
            if not crash(world, step, settle):
                break
            assert world.run(settle)["exit"] == 0, step
            world.expect(APPLIED if settle == "apply" else {})
        assert step > 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EBUSY])
def test_failing_call_at_any_step_leaves_all_or_nothing(world: World, code: int) -> None:
    """One failing system call; where it is in the clean-up, the next run completes that."""

    def fail(name: str, real: Any, args: tuple[Any, ...]) -> None:
        raise OSError(code, os.strerror(code))

    step = 0
    undone = 0
    while True:
        step += 1
        reset(world, "apply")
        before = world.snapshot()

        def body(step: int = step) -> int:
            count = at_step(step, fail)
            result = int(tool.main(world.argv("apply")))
            return result if count() >= step else 50

        result = os.WEXITSTATUS(world.child(body))
        if result == 50:
            break
        if world.snapshot() == before:
            assert result == 7, step
            undone += 1
        else:
            for path in PRISTINE:
                assert world.path(path).read_bytes().decode() == APPLIED[path], step
            assert result in (0, 7), step
        assert world.run("apply")["exit"] == 0
        world.expect(APPLIED)
    assert undone > 20


@pytest.mark.parametrize("limit", [0, 200, 2000])
def test_disk_that_takes_no_more_data(world: World, limit: int) -> None:
    """The kernel's own refusal to extend a file: for the journal, the copies, or a big file."""

    def body() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return int(tool.main(world.argv("apply")))

    before = world.snapshot()
    out = os.open(os.devnull, os.O_WRONLY)
    assert os.WEXITSTATUS(world.child(body, out)) == 7
    assert world.snapshot() == before


def test_full_disk_names_its_cause(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fchmod", full)
    code, message = error(world.run("apply"))
    assert (code, message) == (7, "not writable: the disk is full; nothing was changed")
    world.expect({})


def test_undo_that_fails_too_is_stuck_until_the_cause_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace
    done: list[str] = []

    def once(source: str, target: str) -> None:
        if done:
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        done.append(target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", once)
        code, message = error(world.run("apply"))
    assert code == 8 and "run this again" in message
    assert world.run("revert")["recovered"].startswith("finished")
    world.expect({})


def test_file_changed_between_plan_and_write(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tool.fsync_folder

    def change(folder: str) -> None:
        world.path(C).write_text("foreign\n")
        real(folder)

    monkeypatch.setattr(tool, "fsync_folder", change)
    assert world.run("apply")["exit"] == 4
    world.expect({C: "foreign\n"})


def half_applied(world: World) -> int:
    """An apply killed right after its first rename; returns that step."""
    step = 0
    while world.snapshot()[A][0].decode() != APPLIED[A]:
        step += 1
        reset(world, "apply")
        assert crash(world, step, "apply")
    return step


def test_interrupted_run_then_another_release_installed(world: World) -> None:
    half_applied(world)
    write_tree(world.site, dict.fromkeys(PRISTINE, "other\n"), version="9.9.1")
    report = world.run("apply")
    assert report["recovered"].startswith("undid") and report["exit"] == 4
    world.expect(dict.fromkeys(PRISTINE, "other\n"))


def test_interrupted_run_then_a_foreign_change_is_stuck(world: World) -> None:
    half_applied(world)
    waiting = [p for p in PRISTINE if world.path(p).read_bytes().decode() == PRISTINE[p]]
    world.path(waiting[0]).write_text("foreign\n")
    before = world.snapshot()
    code, message = error(world.run("apply"))
    assert code == 8 and waiting[0] in message and tool.JOURNAL_NAME in message
    assert world.snapshot() == before


def test_interrupted_run_whose_new_copies_are_gone_is_undone(world: World) -> None:
    half_applied(world)
    for path in world.site.rglob(".*.new"):
        path.unlink()
    assert world.run("revert")["recovered"].startswith("undid")
    world.expect({})


@pytest.mark.parametrize(
    ("text", "expected"), [('{"format": 2}\n', "another version"), ("rubbish\n", "unreadable")]
)
def test_foreign_journal_is_stuck(world: World, text: str, expected: str) -> None:
    journal = world.path(f"sglang/{tool.JOURNAL_NAME}")
    journal.write_text(text)
    code, message = error(world.run("apply"))
    assert code == 8 and expected in message and journal.read_text() == text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_waits_until_the_files_are_whole(world: World, number: signal.Signals) -> None:
    def body() -> int:
        real = os.replace

        def interrupted(source: str, target: str) -> None:
            os.kill(os.getpid(), number)
            real(source, target)

        os.replace = interrupted  # type: ignore[assignment]
        return int(tool.main(world.argv("apply")))

    status = world.child(body)
    if number == signal.SIGINT:
        assert os.WEXITSTATUS(status) == 130
    else:
        assert os.WTERMSIG(status) == number
    world.expect(APPLIED)


# ------------------------------------------------------------------------------- the file itself


def test_is_one_file_of_standard_library_and_python_3_8_syntax() -> None:
    tree = ast.parse(TOOL.read_text(), feature_version=(3, 8))
    names = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]  # type: ignore[union-attr]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert names <= sys.stdlib_module_names


def test_help_documents_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    text = capsys.readouterr().out
    for code in (0, *tool.EXIT_CODES.values(), 130):
        assert f"\n{code:3}  " in text
