"""The .pth bootstrap, in real interpreters of an environment of its own beside a fake SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
import venv
from pathlib import Path
from typing import Any

import pytest

from sglang_spec_ext import args
from sglang_spec_ext.compat import bootstrap

ROOT = Path(__file__).parents[2]
PTH = ROOT / "sglang_spec_ext" / "compat" / "sglang_spec_ext_bootstrap.pth"

SGLANG = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/server_args.py": """
        class ServerArgs:
            @staticmethod
            def add_cli_args(parser):
                parser.add_argument("--tp")

            @classmethod
            def from_cli_args(cls, args):
                return cls()
        """,
    "srt/entrypoints/__init__.py": "",
    "srt/entrypoints/engine.py": """
        import sglang.srt.managers.scheduler
        from sglang.srt.server_args import ServerArgs

        class Engine:
            server_args_class: type = ServerArgs
        """,
    "srt/managers/__init__.py": "",
    "srt/managers/scheduler.py": "import sglang.srt.server_args",
}
RECORDING_PLUGIN = """
    import os
    import sys

    calls = []

    def register(only_in=None):
        if os.environ.get("PLUGIN_FAILS"):
            raise RuntimeError("the plugin is broken")
        done = [n for n in sys.modules if n.startswith("sglang.") and n.count(".") > 1]
        calls.append({"only_in": only_in, "imported": sorted(done)})
    """


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))


class Environment:
    """A virtual environment with the .pth, and what Python says in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        (self.site / PTH.name).write_text(PTH.read_text())

    def run(self, code: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.python_runs("-c", textwrap.dedent(code), *argv, **env)

    def python_runs(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SGLANG"))}
        command = [str(self.python), *argv]
        return subprocess.run(command, capture_output=True, text=True, env=clean | env, cwd="/")

    def json(self, code: str, *argv: str, **env: str) -> Any:
        done = self.run("import json, sys\n" + textwrap.dedent(code), *argv, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The bootstrap with a plugin that only records, beside an SGLang without a plugin system."""
    made = Environment(tmp_path_factory.mktemp("recording") / "venv")
    write(made.site / "sglang", SGLANG)
    ours = made.site / "sglang_spec_ext"
    write(ours, {"__init__.py": "", "plugin.py": RECORDING_PLUGIN, "compat/__init__.py": ""})
    (ours / "compat" / "bootstrap.py").write_text(Path(bootstrap.__file__).read_text())
    return made


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The whole package as an editable install has it, beside the same SGLang."""
    made = Environment(tmp_path_factory.mktemp("real") / "venv")
    write(made.site / "sglang", SGLANG)
    # the name that hatchling gives it sorts before ours, so that the package is found in time
    (made.site / "_editable_impl_sglang_spec_ext.pth").write_text(str(ROOT))
    return made


WORKER = {args.WORKER_ENV: args.Settings(4, 4).to_json()}
CALLS = "; from sglang_spec_ext.plugin import calls; print(json.dumps(calls))"
FINDER = "print(json.dumps([type(f).__name__ for f in sys.meta_path].count('Bootstrap')))"


def test_start_imports_ours_and_nothing_else(recording: Environment) -> None:
    code = "print(json.dumps(sorted(sys.modules)))"
    with_it = recording.json(code)
    (recording.site / PTH.name).rename(recording.site / "off")
    try:
        without = recording.json(code)
    finally:
        (recording.site / "off").rename(recording.site / PTH.name)
    ours = ["sglang_spec_ext", "sglang_spec_ext.compat", "sglang_spec_ext.compat.bootstrap"]
    assert sorted(set(with_it) - set(without) - {"__future__"}) == ours


def test_a_process_without_sglang_never_loads_the_plugin(recording: Environment) -> None:
    code = "import email, sglang; print(json.dumps('sglang_spec_ext.plugin' in sys.modules))"
    assert recording.json(code) is False
    assert recording.json(FINDER) == 1


def test_installing_twice_is_once(recording: Environment) -> None:
    code = "import sglang_spec_ext.compat.bootstrap as b; b.install(); "
    assert recording.json(code + FINDER) == 1


def test_launcher_registers_twice_each_time_after_the_import(recording: Environment) -> None:
    parsed, engine = recording.json(
        "import sglang.srt.server_args, sglang.srt.entrypoints.engine" + CALLS
    )
    assert parsed["only_in"] == bootstrap.SERVER_ARGS
    assert bootstrap.ENGINE not in parsed["imported"]
    assert engine["only_in"] is None
    assert {bootstrap.ENGINE, bootstrap.SCHEDULER} <= set(engine["imported"])


def test_importing_the_engine_first_makes_the_same_of_it(recording: Environment) -> None:
    calls = recording.json("import sglang.srt.entrypoints.engine" + CALLS)
    assert [call["only_in"] for call in calls] == [bootstrap.SERVER_ARGS, None]


@pytest.mark.parametrize("left", [WORKER, args.drafting_to_env(True, "warn")])
def test_scheduler_process_registers_after_the_scheduler_only(
    recording: Environment, left: dict[str, str]
) -> None:
    calls = recording.json("import sglang.srt.entrypoints.engine" + CALLS, **left)
    assert [call["only_in"] for call in calls] == [None]


def test_every_spawned_process_has_it(recording: Environment, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import json, multiprocessing, os, sys

            def child(depth):
                import sglang.srt.managers.scheduler
                from sglang_spec_ext.plugin import calls
                print(json.dumps([depth, len(calls)]), flush=True)
                if depth:
                    spawn(depth - 1)

            def spawn(depth):
                process = multiprocessing.get_context("spawn").Process(target=child, args=(depth,))
                process.start()
                process.join()

            if __name__ == "__main__":
                os.environ.update(json.loads(sys.argv[1]))
                spawn(1)
            """
        )
    )
    done = recording.python_runs(str(program), json.dumps(WORKER))
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[1, 1], [0, 1]], done.stderr


def test_switched_off(recording: Environment) -> None:
    off = {bootstrap.SWITCH: "0"}
    assert recording.json(FINDER, **off) == 0
    assert recording.json("import sglang.srt.entrypoints.engine" + CALLS, **off) == []
    assert recording.run("pass", **off).stderr == ""


def test_switched_off_with_the_environment_door_is_said(recording: Environment) -> None:
    door = args.ENV_NAMES["threshold"]
    done = recording.run("pass", **{bootstrap.SWITCH: "0", door: "4"})
    assert f"{door} is set and {bootstrap.SWITCH}=0 too" in done.stderr


def test_a_plugin_system_takes_over(recording: Environment) -> None:
    plugins = recording.site / "sglang" / "srt" / "plugins"
    plugins.mkdir()
    try:
        assert recording.json("import sglang.srt.entrypoints.engine" + CALLS) == []
    finally:
        plugins.rmdir()


def test_sglang_found_by_a_finder_of_its_own(recording: Environment) -> None:
    """As editable installs of SGLang are."""
    code = """
        from importlib.machinery import PathFinder
        class Editable:
            def find_spec(self, name, path=None, target=None):
                if name == "sglang.srt.hidden":
                    return PathFinder.find_spec("sglang.srt.server_args", path)
        import sglang_spec_ext.compat.bootstrap as b
        b.TRIGGERS = ("sglang.srt.hidden",)
        sys.meta_path.append(Editable())
        import sglang.srt.hidden
        from sglang_spec_ext.plugin import calls
        print(json.dumps([len(calls), sglang.srt.hidden.__file__]))
        """
    count, file = recording.json(code)
    assert (count, Path(file).name) == (1, "server_args.py")


# ---------------------------------------------------------------------------- failing loudly

BROKEN = {"PLUGIN_FAILS": "1"}


def test_without_our_flag_a_broken_plugin_costs_nobody_a_server(recording: Environment) -> None:
    done = recording.run("import sglang.srt.entrypoints.engine; print('up')", **BROKEN)
    assert (done.returncode, done.stdout) == (0, "up\n")
    assert "sglang_spec_ext: not loaded, SGLang runs without it: RuntimeError" in done.stderr


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (["--speculative-disable-batch-threshold", "4"], {}),
        (["--speculative-disable-batch-threshold=4"], {}),
        (["--speculative-resume-batch-threshold=4"], {}),
        ([], {args.ENV_NAMES["threshold"]: "4"}),
        ([], {args.ENV_NAMES["min_steps"]: "4"}),
        ([], WORKER),
    ],
)
def test_with_it_the_exception_gets_out(
    recording: Environment, argv: list[str], env: dict[str, str]
) -> None:
    done = recording.run(
        "import sglang.srt.entrypoints.engine; print('up')", *argv, **BROKEN, **env
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.endswith("RuntimeError: the plugin is broken\n")


# ---------------------------------------------------------------------------- the real plugin


def test_the_flags_are_there_before_arguments_are_parsed(real: Environment) -> None:
    code = """
        import argparse
        from sglang.srt.server_args import ServerArgs
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        namespace = parser.parse_args()
        engine = [m for m in sys.modules if m.startswith("sglang.srt.entrypoints")]
        print(json.dumps([vars(namespace), engine]))
        """
    found, engine = real.json(code, "--speculative-disable-batch-threshold", "4")
    assert found["speculative_disable_batch_threshold"] == "4"
    assert engine == []


def test_the_engine_takes_our_keywords(real: Environment) -> None:
    code = """
        from sglang.srt.entrypoints.engine import Engine
        from sglang_spec_ext.plugin import verify_bound
        print(json.dumps([type(Engine.server_args_class).__name__, verify_bound()]))
        """
    assert real.json(code) == ["SeamedClass", []]


def test_a_release_that_does_not_fit_is_refused_by_name(real: Environment) -> None:
    code = """
        from sglang.srt.server_args import ServerArgs
        import argparse
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        ServerArgs.from_cli_args(parser.parse_args())
        """
    done = real.run(code, "--speculative-disable-batch-threshold", "4")
    assert done.returncode == 1
    assert "--speculative-disable-batch-threshold cannot take effect" in done.stderr


# ---------------------------------------------------------------------------- the package


def test_the_file_is_one_line_that_site_executes() -> None:
    (line,) = PTH.read_text().splitlines()
    assert line.startswith("import ")


def test_the_wheel_has_it_where_site_looks() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {PTH.relative_to(ROOT).as_posix(): PTH.name}


def test_names_are_those_of_the_other_modules() -> None:
    assert args.ENV_NAMES["threshold"] == bootstrap._DOOR
    assert bootstrap._SPAWNED == (args.WORKER_ENV, args.DRAFTING_WORKER_ENV)
    names = (*args.ENV_NAMES.values(), *bootstrap._SPAWNED)
    assert all(name.startswith(bootstrap._PREFIX) for name in names)
    assert set(bootstrap._FLAGS) == set(args.FLAGS.values())
