"""tools/verify_imports.py against fake environments: a folder on PYTHONPATH, site-packages off."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "verify_imports.py"

# As SGLang's loader: a plugin's exception is logged, not raised.
FAKE_LOADER = """
import logging, os
from importlib.metadata import entry_points
logger = logging.getLogger(__name__)
def load_plugins():
    allowed = os.environ.get("SGLANG_PLUGINS")
    for entry in entry_points(group="sglang.srt.plugins"):
        if allowed and entry.name not in allowed.replace(" ", "").split(","):
            continue
        try:
            entry.load()()
        except Exception:
            logger.exception("Failed to execute general plugin: %s", entry.name)
"""

FAKE_PLUGIN = """
import json, multiprocessing, os
def register():
    settings = json.loads(os.environ["SGLANG_SPEC_EXT_WORKER"])
    assert settings["threshold"] == 4
    assert multiprocessing.parent_process() is not None, "not a spawned process"
    import sglang.srt.managers.scheduler as scheduler
    scheduler.hooked = True
def verify_bound():
    import sglang.srt.managers.scheduler as scheduler
    return [] if getattr(scheduler, "hooked", False) else ["Scheduler.run", "Scheduler.stop"]
"""

FAKE_ARGS = """
import json
class Settings:
    def __init__(self, threshold):
        self.threshold = threshold
    def to_env(self):
        return {"SGLANG_SPEC_EXT_WORKER": json.dumps({"threshold": self.threshold})}
def build(threshold):
    return Settings(threshold)
"""

FAKE_WORKERS = """
from types import SimpleNamespace
def point(name, module):
    return SimpleNamespace(name=name, module=module)
TOUCH_POINTS = [
    point("scheduler", "sglang.srt.managers.scheduler"),
    point("worker", "sglang.srt.worker"),
    point("run", "sglang.srt.worker"),
    point("pool", "sglang.srt.old_place_of_pool"),
    point("pool", "sglang.srt.pool"),
]
def contract(site):
    return SimpleNamespace(points=TOUCH_POINTS)
def holding(name, site):
    places = [point for point in TOUCH_POINTS if point.name == name]
    return next((p for p in places if source(p.module, site).exists()), None)
def source(module, site):
    return site.joinpath(*module.split(".")).with_suffix(".py")
def check(site):
    text = source("sglang.srt.worker", site).read_text()
    return [] if "class Worker" in text else ["Worker is gone", "Worker.run is gone"]
def seams(site):
    return {"Scheduler.run": False, "Scheduler.stop": False}
"""

FAKE_SEAMS = """
def ensure_registered(module):
    assert module == "sglang.srt.managers.scheduler"
    from sglang_spec_ext import plugin
    plugin.register()
"""

FAKE_TORCH = """
from types import SimpleNamespace
__version__ = "2.0.0"
version = SimpleNamespace(cuda="13.0", hip=None)
cuda = SimpleNamespace(is_available=lambda: {cuda}, device_count=lambda: 2)
"""


class Box:
    """A fake serving environment; healthy until a test damages it."""

    def __init__(self, root: Path) -> None:
        self.site = root / "site-packages"
        self.cwd = root / "cwd"
        self.cwd.mkdir()
        self.path = [self.site]
        self.flags = ["-S"]
        self.env: dict[str, str] = {}
        self.add_torch()
        self.add_sglang()
        self.add_plugin()

    def write(self, name: str, text: str, folder: Path | None = None) -> Path:
        path = (folder or self.site) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    def add_torch(self, cuda: bool = False) -> None:
        self.write("torch/__init__.py", FAKE_TORCH.format(cuda=cuda))

    def add_sglang(self, version: str = "0.5.23", folder: Path | None = None) -> None:
        files = {
            "__init__.py": "from sglang.version import __version__",
            "version.py": f'__version__ = "{version}"',
            "srt/__init__.py": "",
            "srt/plugins/__init__.py": FAKE_LOADER,
            "srt/managers/__init__.py": "",
            "srt/managers/scheduler.py": "class Scheduler: pass",
            "srt/worker.py": "class Worker: pass",
            "srt/pool.py": "class Pool: pass",
        }
        for name, text in files.items():
            self.write(f"sglang/{name}", text, folder)
        self.add_metadata("sglang", version, [f"sglang/{name}" for name in files], folder)

    def add_plugin(self) -> None:
        files = {
            "__init__.py": '__version__ = "0.1.0"',
            "plugin.py": FAKE_PLUGIN,
            "args.py": FAKE_ARGS,
            "compat/__init__.py": "",
            "compat/workers.py": FAKE_WORKERS,
        }
        for name, text in files.items():
            self.write(f"sglang_spec_ext/{name}", text)
        folder = self.add_metadata("sglang_spec_ext", "0.1.0", list(files))
        (folder / "RECORD").unlink()
        (folder / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nspec_ext = sglang_spec_ext.plugin:register\n"
        )

    def add_metadata(
        self, name: str, version: str, files: list[str], folder: Path | None = None
    ) -> Path:
        metadata = (folder or self.site) / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        return metadata

    def patch(self, *, all_of_it: bool = True) -> None:
        """Apply the diffs of patches/, so to say: their seams call the plugin."""
        found = {"Scheduler.run": True, "Scheduler.stop": all_of_it}
        text = FAKE_WORKERS + f"def seams(site):\n    return {found}\n"
        self.write("sglang_spec_ext/compat/workers.py", text)
        self.write("sglang_spec_ext/seams.py", FAKE_SEAMS)

    def remove(self, name: str) -> None:
        subprocess.run(["rm", "-r", str(self.site / name)], check=True)

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        inherited = ("SGLANG", "PYTHON", "COLUMNS")
        env = {k: v for k, v in os.environ.items() if not k.startswith(inherited)}
        env["PYTHONPATH"] = os.pathsep.join(map(str, self.path))
        return subprocess.Popen(
            [sys.executable, *self.flags, str(TOOL), *arguments],
            env={**env, **self.env},
            cwd=self.cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        process = self.popen(*arguments)
        output, errors = process.communicate(timeout=300)
        assert "Traceback" not in output + errors, output + errors
        return process.returncode, output + errors

    def check(self, *arguments: str) -> Report:
        code, output = self.run("--json", *arguments)
        return Report(code, json.loads(output))


class Report:
    def __init__(self, code: int, data: dict[str, Any]) -> None:
        self.code = code
        self.data = data
        assert data["exit_code"] == code

    def named(self, name: str) -> list[dict[str, Any]]:
        return [check for check in self.data["checks"] if check["name"] == name]

    def one(self, name: str) -> tuple[str, str]:
        (check,) = self.named(name)
        return check["status"], check["message"]

    def status(self, name: str) -> str:
        return self.one(name)[0]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


ALL_CHECKS = [
    "python", "sglang", "torch", "plugin", "plugin system", "entry point", "plugin import",
    "contract", "sglang import", "modules", "hooks",
]  # fmt: skip


# ------------------------------------------------------------------------------------ healthy


def test_healthy_environment_is_all_ok(box: Box) -> None:
    report = box.check()
    assert [(c["name"], c["status"]) for c in report.data["checks"]] == [
        (name, "OK") for name in ALL_CHECKS
    ]
    assert report.code == 0
    # Each module once, and none that this release has not got.
    assert report.named("modules")[0]["data"]["modules"] == [
        "sglang.srt.managers.scheduler",
        "sglang.srt.worker",
        "sglang.srt.pool",
    ]


def test_text_has_one_aligned_line_per_check(box: Box) -> None:
    code, output = box.run()
    *lines, summary = output.splitlines()
    assert [line[:20].split(None, 1) for line in lines] == [["OK", f"{n:<14}"] for n in ALL_CHECKS]
    assert all(line[20] == " " and line[21] != " " for line in lines)
    assert summary == "11 OK, 0 WARN, 0 FAIL, 0 SKIP; exit code 0"
    assert code == 0
    assert output.isascii()


def test_json_shape(box: Box) -> None:
    data = box.check().data
    assert set(data) == {"schema", "exit_code", "summary", "checks"}
    assert data["schema"] == 1
    assert data["summary"] == {"OK": 11, "WARN": 0, "FAIL": 0, "SKIP": 0}
    for check in data["checks"]:
        assert set(check) == {"name", "status", "message", "details", "data"}
        assert "\n" not in check["message"]
    assert "output" in box.check("-v").data["checks"][0]


def test_child_output_is_shown_only_when_asked_for(box: Box) -> None:
    box.write("sglang/srt/pool.py", "print('chatter of an import')")
    assert "chatter" not in box.run()[1]
    assert "chatter" in box.run("-v")[1]


def test_python_option_checks_that_interpreter(box: Box, tmp_path: Path) -> None:
    other = tmp_path / "other-python"
    other.symlink_to(sys.executable)
    report = box.check("--python", str(other), "--timeout", "100")
    assert report.named("python")[0]["data"]["executable"] == str(other)
    assert report.code == 0


# ------------------------------------------------------------------------------------- sglang


def test_sglang_missing(box: Box) -> None:
    box.remove("sglang")
    box.remove("sglang-0.5.23.dist-info")
    report = box.check()
    assert report.code == 2
    status, message = report.one("sglang")
    assert status == "FAIL"
    assert "not installed" in message and "--python" in message
    for name in ("plugin system", "contract", "modules", "hooks"):
        assert report.status(name) == "SKIP"


def test_sglang_import_raises(box: Box) -> None:
    box.write("sglang/__init__.py", "import sglang.srt.helper")
    box.write("sglang/srt/helper.py", "\nimport no_such_thing")
    report = box.check()
    assert report.code == 2
    status, message = report.one("sglang import")
    assert status == "FAIL"
    assert "No module named 'no_such_thing'" in message
    assert "(in sglang/srt/helper.py:2)" in message
    assert report.status("modules") == "SKIP"


def test_sglang_folder_without_init_is_half_deleted(box: Box) -> None:
    box.remove("sglang/__init__.py")
    status, message = box.check().one("sglang")
    assert status == "FAIL"
    assert "no __init__.py" in message
    assert "pip install --force-reinstall --no-deps sglang==0.5.23" in message


def test_metadata_without_files(box: Box) -> None:
    box.remove("sglang")
    status, message = box.check().one("sglang")
    assert (status, "pip lists 0.5.23 but its files are gone" in message) == ("FAIL", True)


def test_metadata_half_deleted(box: Box) -> None:
    box.remove("sglang-0.5.23.dist-info/METADATA")
    box.remove("sglang-0.5.23.dist-info/RECORD")
    status, message = box.check().one("sglang")
    assert status == "WARN"
    assert "pip's metadata says ?" in message


def test_files_of_the_wheel_are_gone(box: Box) -> None:
    box.remove("sglang/srt/pool.py")
    status, message = box.check().one("sglang")
    assert status == "WARN"
    assert "1 of its files are gone (first: sglang/srt/pool.py)" in message


def test_a_lone_file_hides_the_package(box: Box, tmp_path: Path) -> None:
    lone = box.write("sglang.py", "", tmp_path / "first")
    box.path.insert(0, lone.parent)
    status, message = box.check().one("sglang")
    assert status == "FAIL"
    assert f"{lone} is a lone file" in message


def test_two_copies(box: Box, tmp_path: Path) -> None:
    first = tmp_path / "first"
    box.add_sglang("0.5.22", first)
    box.path.insert(0, first)
    report = box.check()
    status, message = report.one("sglang")
    assert status == "WARN"
    assert message.startswith("0.5.22, ")
    assert f"2 copies on sys.path, this one hides {box.site / 'sglang'}" in message
    assert "metadata of several versions (0.5.22, 0.5.23)" in message
    assert report.code == 4


def test_one_folder_twice_on_the_path_is_one_copy(box: Box) -> None:
    box.path.append(box.site / ".." / "site-packages")
    assert box.check().code == 0


def test_version_of_metadata_and_code_differ(box: Box) -> None:
    box.write("sglang/version.py", '__version__ = "0.5.9"')
    status, message = box.check().one("sglang")
    assert status == "WARN"
    assert "pip's metadata says 0.5.23, the code 0.5.9" in message


def test_current_folder_would_shadow_under_dash_m(box: Box) -> None:
    box.write("sglang/__init__.py", "", box.cwd)
    status, message = box.check().one("sglang")
    assert status == "WARN"
    assert "`python -m` from this folder would take ./sglang/__init__.py" in message


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        ({"url": "file:///w/sglang.whl", "archive_info": {}}, "wheel from file:///w/sglang.whl"),
        ({"url": "file:///src/a%20b", "dir_info": {}}, "built from /src/a b"),
        (
            {"url": "https://x/sglang.git", "vcs_info": {"commit_id": "0123456789abcdef"}},
            "built from https://x/sglang.git at 012345678",
        ),
        (None, "0.5.23, wheel, "),
        ("{ damaged", "0.5.23, wheel, "),
    ],
)
def test_origin(box: Box, direct_url: Any, expected: str) -> None:
    if direct_url is not None:
        text = direct_url if isinstance(direct_url, str) else json.dumps(direct_url)
        box.write("sglang-0.5.23.dist-info/direct_url.json", text)
    status, message = box.check().one("sglang")
    assert status == "OK"
    assert expected in message


def test_editable_git_checkout(box: Box, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (box.site / "sglang").rename(box.write("python/x", "", checkout).parent / "sglang")
    box.write(".git/HEAD", "ref: refs/heads/main\n", checkout)
    box.write(".git/packed-refs", "0123456789abcdef refs/heads/main\n", checkout)
    source = {"url": f"file://{checkout}/python", "dir_info": {"editable": True}}
    box.write("sglang-0.5.23.dist-info/direct_url.json", json.dumps(source))
    box.write("sglang-0.5.23.dist-info/RECORD", "")
    box.path.append(checkout / "python")
    status, message = box.check().one("sglang")
    assert status == "OK"
    assert f"editable, git checkout {checkout} at 012345678" in message


def test_checkout_on_pythonpath_without_metadata(box: Box, tmp_path: Path) -> None:
    box.remove("sglang-0.5.23.dist-info")
    (box.site / "sglang").rename(box.write("x", "", tmp_path / "src").parent / "sglang")
    box.path.append(tmp_path / "src")
    status, message = box.check().one("sglang")
    assert status == "WARN"
    assert "plain folder, not installed by pip" in message


def test_old_release_has_no_plugin_system(box: Box) -> None:
    box.remove("sglang/srt/plugins")
    report = box.check()
    status, message = report.one("plugin system")
    assert status == "FAIL"
    assert "0.5.11" in message
    assert "sglang_spec_ext_bootstrap.pth did not run: pip install sglang-spec-ext" in message
    assert report.status("hooks") == "SKIP"
    assert report.status("modules") == "OK"
    assert report.code == 2


def test_old_release_with_our_bootstrap_switched_off(box: Box) -> None:
    box.remove("sglang/srt/plugins")
    box.env["SGLANG_SPEC_EXT_BOOTSTRAP"] = "0"
    status, message = box.check().one("plugin system")
    assert status == "FAIL"
    assert "SGLANG_SPEC_EXT_BOOTSTRAP=0 switches" in message


def test_old_release_with_our_bootstrap(box: Box) -> None:
    """Each interpreter starts it; it registers after the import of the scheduler."""
    box.remove("sglang/srt/plugins")
    box.write(
        "sglang_spec_ext/compat/bootstrap.py",
        """
        import importlib.machinery, os, sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                worker = "SGLANG_SPEC_EXT_WORKER" in os.environ
                if worker and name == "sglang.srt.managers.scheduler":
                    spec = importlib.machinery.PathFinder.find_spec(name, path)
                    execute = spec.loader.exec_module
                    def execute_and_register(module):
                        execute(module)
                        module.hooked = True
                    spec.loader.exec_module = execute_and_register
                    return spec
        def install():
            sys.meta_path.insert(0, Finder())
        """,
    )
    # this one runs as early as our .pth, which is there only where we are installed
    box.write("sitecustomize.py", "from sglang_spec_ext.compat.bootstrap import install; install()")
    box.flags = []
    report = box.check()
    status, message = report.one("plugin system")
    assert status == "OK"
    assert "sglang_spec_ext_bootstrap.pth loads the plugin" in message
    assert report.one("hooks") == ("OK", "all bound in a spawned, scheduler-like process")


# -------------------------------------------------------------------------------------- torch


def test_cuda_visible_or_not_is_no_failure(box: Box) -> None:
    assert "CUDA not visible" in box.check().one("torch")[1]
    box.add_torch(cuda=True)
    status, message = box.check().one("torch")
    assert (status, message) == ("OK", "2.0.0, CUDA visible, 2 device(s)")


@pytest.mark.parametrize(
    ("torch", "cause"),
    [
        ("raise OSError('libtorch_cpu.so: cannot open shared object file')", "libtorch_cpu.so: "),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ("import os; print('last words', flush=True); os._exit(7)", "exit code 7: last words"),
    ],
)
def test_torch_broken(box: Box, torch: str, cause: str) -> None:
    box.write("torch/__init__.py", torch)
    report = box.check()
    status, message = report.one("torch")
    assert status == "FAIL"
    assert cause in message
    assert report.code == 2


def test_torch_missing(box: Box) -> None:
    box.remove("torch")
    assert "No module named 'torch'" in box.check().one("torch")[1]


# ------------------------------------------------------------------------------------- plugin


def test_plugin_missing(box: Box) -> None:
    box.remove("sglang_spec_ext")
    box.remove("sglang_spec_ext-0.1.0.dist-info")
    report = box.check()
    assert report.one("plugin") == ("FAIL", "not installed; pip install sglang-spec-ext")
    assert report.status("sglang import") == "OK"
    for name in ("entry point", "contract", "modules", "hooks"):
        assert report.status(name) == "SKIP"
    assert report.code == 2


def test_plugin_folder_without_metadata_has_no_entry_point(box: Box) -> None:
    box.remove("sglang_spec_ext-0.1.0.dist-info")
    report = box.check()
    status, message = report.one("entry point")
    assert status == "FAIL"
    assert "pip install sglang-spec-ext" in message
    assert report.status("hooks") == "SKIP"


@pytest.mark.parametrize("listed", ["other", "spec_ext2", ","])
def test_entry_point_hidden(box: Box, listed: str) -> None:
    box.env["SGLANG_PLUGINS"] = listed
    report = box.check()
    status, message = report.one("entry point")
    assert status == "FAIL"
    assert f"SGLANG_PLUGINS={listed} hides spec_ext" in message
    assert report.status("hooks") == "SKIP"


@pytest.mark.parametrize("listed", ["", "spec_ext", "other, spec_ext"])
def test_entry_point_not_hidden(box: Box, listed: str) -> None:
    box.env["SGLANG_PLUGINS"] = listed
    assert box.check().code == 0


def test_entry_point_object_does_not_import(box: Box) -> None:
    text = "\nfrom sglang.srt.managers.scheduler import Renamed\n"
    box.write("sglang_spec_ext/plugin.py", text + FAKE_PLUGIN)
    report = box.check()
    status, message = report.one("plugin import")
    assert status == "FAIL"
    assert "cannot import name 'Renamed'" in message
    assert "(in site-packages/sglang_spec_ext/plugin.py:2)" in message
    status, message = report.one("hooks")
    assert status == "FAIL"
    assert "cannot import name 'Renamed'" in message


def test_entry_point_object_is_gone(box: Box) -> None:
    box.write("sglang_spec_ext/plugin.py", FAKE_PLUGIN.replace("def register", "def renamed"))
    assert "has no attribute 'register'" in box.check().one("plugin import")[1]


def test_contract_violation(box: Box) -> None:
    box.write("sglang/srt/worker.py", "")
    report = box.check()
    (check,) = report.named("contract")
    assert check["status"] == "FAIL"
    assert check["message"] == "SGLang 0.5.23 does not fit: Worker is gone (and 1 more, see -v)"
    assert check["details"] == ["Worker is gone", "Worker.run is gone"]
    assert "- Worker.run is gone" in box.run("-v")[1]


def test_contract_cannot_be_read(box: Box) -> None:
    text = (
        "from types import SimpleNamespace\ndef contract(site): return SimpleNamespace(points=[1])"
    )
    box.write("sglang_spec_ext/compat/workers.py", text)
    report = box.check()
    status, message = report.one("contract")
    assert status == "FAIL"
    assert "AttributeError: 'int' object has no attribute 'name'" in message
    assert report.status("modules") == "SKIP"


# ------------------------------------------------------------------------------------ modules


def test_first_cause_of_a_failing_import(box: Box) -> None:
    box.write(
        "sglang/srt/worker.py",
        """
        class Worker: pass
        try:
            import missing_dependency
        except ImportError:
            raise RuntimeError("cannot set up\\nworker")
        """,
    )
    report = box.check()
    status, message = report.one("modules")
    assert status == "FAIL"
    assert message == (
        "sglang.srt.worker: ModuleNotFoundError: No module named 'missing_dependency'"
        " (in sglang/srt/worker.py:4)"
    )
    assert report.code == 2


def test_modules_that_fail_alike_share_a_line(box: Box) -> None:
    for name in ("worker", "pool"):
        box.write(f"sglang/srt/{name}.py", "class Worker: pass\nimport sglang.srt.common")
    box.write("sglang/srt/common.py", "raise ValueError('bad build')")
    (check,) = box.check().named("modules")
    assert check["message"].startswith("sglang.srt.worker and 1 more: ValueError: bad build")
    assert check["data"]["modules"] == ["sglang.srt.worker", "sglang.srt.pool"]


def test_a_failure_caused_by_an_earlier_one_is_not_reported(box: Box) -> None:
    # The second import of a module that registered something before it failed says another thing.
    box.write("sglang/srt/worker.py", "class Worker: pass\nimport sys; sys.dirty = 1; import nope")
    box.write("sglang/srt/pool.py", "import sys\nif hasattr(sys, 'dirty'): raise ValueError('dup')")
    (check,) = box.check().named("modules")
    assert check["data"]["modules"] == ["sglang.srt.worker"]
    assert "No module named 'nope'" in check["message"]


def test_a_crash_does_not_hide_the_modules_after_it(box: Box) -> None:
    box.write("sglang/srt/worker.py", "import os  # class Worker\nos.abort()")
    box.write("sglang/srt/pool.py", "import nope")
    messages = [check["message"] for check in box.check().named("modules")]
    assert messages == [
        "sglang.srt.worker: the process died of SIGABRT",
        "sglang.srt.pool: ModuleNotFoundError: No module named 'nope' (in sglang/srt/pool.py:1)",
    ]


LIBCUDA = """
class Worker: pass
raise ImportError('''
[sgl_kernel] CRITICAL: Could not load any common_ops library!
1. pattern: /x/common_ops.* - found files: ['/x/common_ops.abi3.so']
Error details from previous import attempts:
- ImportError: libcuda.so.1: cannot open shared object file: No such file or directory
- ModuleNotFoundError: No module named 'common_ops'
''')
"""


def test_no_cuda_libraries_on_a_box_without_cuda_is_a_warning(box: Box) -> None:
    box.write("sglang/srt/worker.py", LIBCUDA)
    report = box.check()
    assert report.one("modules") == (
        "WARN",
        "sglang.srt.worker: cannot check on a box without CUDA libraries"
        " (libcuda.so.1: cannot open shared object file: No such file or directory)",
    )
    assert report.status("hooks") == "OK"
    assert report.code == 4


def test_hooks_cannot_be_checked_without_cuda_libraries(box: Box) -> None:
    box.write("sglang/srt/managers/scheduler.py", LIBCUDA)
    report = box.check()
    status, message = report.one("hooks")
    assert status == "WARN"
    assert message.startswith("cannot check on a box without CUDA libraries (libcuda.so.1")
    assert report.code == 4


def test_no_cuda_libraries_where_cuda_is_visible_is_a_failure(box: Box) -> None:
    box.add_torch(cuda=True)
    box.write("sglang/srt/worker.py", LIBCUDA)
    status, message = box.check().one("modules")
    assert status == "FAIL"
    assert message.startswith("sglang.srt.worker: libcuda.so.1: cannot open")


# -------------------------------------------------------------------------------------- seams


def test_patched_and_every_other_way_closed(box: Box) -> None:
    box.patch()
    box.env["SGLANG_PLUGINS"] = "other"
    box.remove("sglang/srt/plugins")
    report = box.check()
    for name in ("plugin system", "entry point"):
        status, message = report.one(name)
        assert (status, "this SGLang is patched" in message) == ("OK", True)
    assert report.one("seams") == ("OK", "all 2 places are patched to call the plugin")
    assert report.one("hooks") == ("OK", "all bound in a spawned, scheduler-like process")
    assert report.status("sglang") == "WARN"  # its plugin system was taken away above
    assert report.code == 4


def test_patched_and_loaded_as_a_plugin_too(box: Box) -> None:
    box.patch()
    report = box.check()
    assert report.code == 0
    assert report.one("entry point")[1].startswith("spec_ext = ")


def test_patched_in_part_opens_no_way(box: Box) -> None:
    box.patch(all_of_it=False)
    box.env["SGLANG_PLUGINS"] = "other"
    report = box.check()
    status, message = report.one("seams")
    assert status == "WARN"
    assert "1 of 2 places are patched to call the plugin, not Scheduler.stop" in message
    assert report.status("entry point") == "FAIL"
    assert report.status("hooks") == "SKIP"


def test_seam_that_fails(box: Box) -> None:
    box.patch()
    box.env["SGLANG_PLUGINS"] = "other"
    text = FAKE_PLUGIN.replace("scheduler.hooked = True", "raise ValueError('moved away')")
    box.write("sglang_spec_ext/plugin.py", text)
    status, message = box.check().one("hooks")
    assert status == "FAIL"
    assert message.startswith("first call of a seam: ValueError: moved away")


# -------------------------------------------------------------------------------------- hooks


def test_hook_not_bound(box: Box) -> None:
    text = FAKE_PLUGIN.replace("scheduler.hooked = True", "pass")
    box.write("sglang_spec_ext/plugin.py", text)
    report = box.check()
    (check,) = report.named("hooks")
    assert check["status"] == "FAIL"
    assert check["message"] == (
        "2 not bound in a spawned process: Scheduler.run (and 1 more, see -v)"
    )
    assert check["data"]["unbound"] == ["Scheduler.run", "Scheduler.stop"]
    assert report.code == 2


def test_what_the_loader_swallowed_is_shown(box: Box) -> None:
    text = FAKE_PLUGIN.replace("scheduler.hooked = True", "raise ValueError('moved away')")
    box.write("sglang_spec_ext/plugin.py", text)
    status, message = box.check().one("hooks")
    assert status == "FAIL"
    assert "Failed to execute general plugin: spec_ext: ValueError: moved away" in message


def test_error_of_the_loader_with_all_hooks_bound_is_a_warning(box: Box) -> None:
    text = FAKE_PLUGIN.replace("hooked = True", "hooked = True; raise ValueError('too late')")
    box.write("sglang_spec_ext/plugin.py", text)
    status, message = box.check().one("hooks")
    assert status == "WARN"
    assert "too late" in message


def test_register_that_stops_the_process(box: Box) -> None:
    text = FAKE_PLUGIN.replace(
        "scheduler.hooked = True", "raise SystemExit('it lacks:\\n - this\\nadvice')"
    )
    box.write("sglang_spec_ext/plugin.py", text)
    status, message = box.check().one("hooks")
    assert status == "FAIL"
    assert "SystemExit: it lacks: - this (in " in message


def test_spawned_process_crashes(box: Box) -> None:
    text = FAKE_PLUGIN.replace("scheduler.hooked = True", "os.abort()")
    box.write("sglang_spec_ext/plugin.py", text)
    status, message = box.check().one("hooks")
    assert status == "FAIL"
    assert "the spawned process died of SIGABRT" in message


# ----------------------------------------------------------------------- hangs, interruptions


HANG = """
import os, pathlib, subprocess, sys, time
class Worker: pass
helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
note = pathlib.Path({pids!r})
note.with_suffix(".tmp").write_text(f"{{os.getpid()}} {{helper.pid}}")
note.with_suffix(".tmp").replace(note)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"  # dead, only not collected yet by whoever adopted it


def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.1)
    return False


def all_gone(pids: Path) -> bool:
    started = [int(pid) for pid in pids.read_text().split()]
    return eventually(lambda: all(gone(pid) for pid in started))


def test_module_that_hangs(box: Box, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hanging = box.write("sglang/srt/worker.py", HANG.format(pids=str(pids)))
    report = box.check("--timeout", "3")
    hung, skipped = report.named("modules")
    assert hung["status"] == "FAIL"
    assert "sglang.srt.worker: did not finish in 3 s" in hung["message"]
    assert f"(in {hanging}:8)" in hung["message"]
    assert (skipped["status"], skipped["details"]) == ("SKIP", ["sglang.srt.pool"])
    assert report.status("hooks") == "OK"
    assert all_gone(pids)


def test_spawned_process_that_hangs(box: Box, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hang = "import multiprocessing\nif multiprocessing.parent_process():\n" + "".join(
        f"    {line}\n" for line in HANG.format(pids=str(pids)).strip().splitlines()
    )
    box.write("sglang/srt/managers/scheduler.py", hang)
    report = box.check("--timeout", "3")
    assert report.status("modules") == "OK"
    status, message = report.one("hooks")
    assert status == "FAIL"
    assert "import of SGLang's scheduler in a spawned process: did not finish in 3 s" in message
    assert "scheduler.py:9" in message
    assert all_gone(pids)


def test_sglang_that_hangs(box: Box) -> None:
    box.write("sglang/__init__.py", "import time; time.sleep(600)")
    report = box.check("--timeout", "2")
    assert "import sglang: did not finish in 2 s" in report.one("sglang import")[1]
    assert report.code == 2


def test_driver_that_hangs_is_a_warning(box: Box) -> None:
    text = FAKE_TORCH.format(cuda="__import__('time').sleep(600)")
    box.write("torch/__init__.py", text)
    status, message = box.check("--timeout", "2").one("torch")
    assert status == "WARN"
    assert message.startswith("2.0.0, CUDA cannot be asked: did not finish in 2 s")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(box: Box, tmp_path: Path, signum: signal.Signals) -> None:
    pids = tmp_path / "pids"
    box.write("torch/__init__.py", HANG.format(pids=str(pids)))
    process = box.popen()
    try:
        assert eventually(pids.exists)
        process.send_signal(signum)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signum
    assert "Traceback" not in output + errors
    assert all_gone(pids)


# -------------------------------------------------------------------------------- other modes


def test_release_check_of_a_folder_and_a_wheel(box: Box, tmp_path: Path) -> None:
    box.add_sglang("0.5.24", tmp_path / "checkout" / "python")
    wheel = tmp_path / "sglang-0.5.25-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang/__init__.py", "raise SystemExit('must not be imported')")
        archive.writestr("sglang/srt/worker.py", "")
    good, bad = box.check("--release-check", str(tmp_path / "checkout"), str(wheel)).data["checks"]
    assert (good["name"], good["status"]) == ("contract", "OK")
    assert bad["status"] == "FAIL"
    assert bad["message"].startswith(f"{wheel} does not fit: Worker is gone")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["surplus"], "unrecognized arguments: surplus"),
        (["--timeout", "soon"], "soon is not a number of seconds"),
        (["--timeout", "0"], "0 is not a number of seconds"),
        (["--timeout", "nan"], "nan is not a number of seconds"),
        (["--python", "/no/such/python"], "/no/such/python: no such executable"),
        (["--python", "true"], "true: is no Python of 3.8 or newer"),
        (["--release-check"], "expected at least one argument"),
        (["--release-check", "/no/such.whl"], "neither a wheel"),
    ],
)
def test_usage_errors(box: Box, arguments: list[str], text: str) -> None:
    code, output = box.run(*arguments)
    assert code == 3
    assert text in output


def test_python_option_names_the_interpreter_of_a_folder(box: Box, tmp_path: Path) -> None:
    box.write("bin/python", "", tmp_path / "venv")
    code, output = box.run("--python", str(tmp_path / "venv"))
    assert code == 3
    assert f"did you mean {tmp_path}/venv/bin/python?" in output


def test_help_documents_the_exit_codes(box: Box) -> None:
    code, output = box.run("--help")
    assert code == 0
    for line in ("0    every check is OK", "2    at least one FAIL", "3    usage", "4    no FAIL"):
        assert line in output


def test_a_closed_pipe_is_no_error(box: Box) -> None:
    process = box.popen()
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE


def test_needs_only_the_standard_library_and_python_3_8() -> None:
    tree = ast.parse(TOOL.read_text(), feature_version=(3, 8))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= set(sys.stdlib_module_names)
