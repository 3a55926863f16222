"""`python3 demo.py`: finds or makes the environment and goes on inside it.

Standard library only, with what it imports: this part runs on the system's Python.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from testbed.demo import DemoError
from testbed.demo.install import Environment, check_environment
from testbed.demo.processes import INTERRUPTS

CHECKOUT = Path(__file__).resolve().parents[2]
_INSIDE = "--inside"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="demo.py",
        description="Shows SGLang with sglang_spec_ext on a tiny model, on CPU: lone requests "
        "speculate, a burst decodes with the target alone, lone requests speculate again, and "
        "the output is that of a plain server. Makes its own environment on the first run.",
        epilog="Exit status: 0 everything held, 1 something did not, 2 the demo could not start, "
        "130 interrupted. Only 127.0.0.1 is used, on free ports.",
    )
    where = result.add_mutually_exclusive_group()
    where.add_argument(
        "--env",
        metavar="DIR",
        type=Path,
        default=CHECKOUT / ".cache" / "demo-venv",
        help="where the environment is made and found again (default: .cache/demo-venv here)",
    )
    where.add_argument(
        "--python",
        metavar="PATH",
        help="the Python of an existing environment with SGLang and this checkout; nothing is "
        "installed then",
    )
    result.add_argument(
        "--logs",
        metavar="DIR",
        type=Path,
        help="keep the servers' logs here (default: a temporary folder, kept if something failed)",
    )
    # Set when this script starts itself again with the environment's Python.
    result.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    INTERRUPTS.install()
    try:
        if sys.platform != "linux":
            raise DemoError(f"SGLang's CPU engine runs on Linux, this is {sys.platform}")
        if arguments.inside:
            check_environment(CHECKOUT)
            from testbed.demo.show import show

            return show(arguments.logs)
        _continue_inside(_environment_python(arguments), arguments.logs)
    except DemoError as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo.py: interrupted, everything that it started is stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away. Python must not try to flush to it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _environment_python(arguments: argparse.Namespace) -> Path:
    if arguments.python is None:
        environment = Environment(arguments.env.resolve(), CHECKOUT)
        environment.ensure()
        return environment.python
    # Not resolved: a virtual environment's python is a link to the one that made it.
    python = Path(os.path.abspath(arguments.python))
    try:
        subprocess.run([python, "-c", ""], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        raise DemoError(f"--python {arguments.python} is no Python that runs") from None
    return python


def _continue_inside(python: Path, logs: Path | None) -> NoReturn:
    command = [str(python), str(CHECKOUT / "demo.py"), _INSIDE]
    if logs is not None:
        command += ["--logs", str(logs)]
    sys.stdout.flush()
    os.execv(python, command)
