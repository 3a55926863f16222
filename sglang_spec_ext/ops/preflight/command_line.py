"""Take an SGLang command apart: environment, launcher, arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_MODULES = ("sglang.launch_server", "sglang.srt.entrypoints.http_server")


class CommandError(ValueError):
    """No SGLang command was found; the message says what is expected."""


@dataclass(frozen=True)
class Command:
    """``environment`` is what the command itself sets, ``launcher`` ends where arguments begin."""

    environment: dict[str, str]
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]


def split_command(words: Sequence[str]) -> Command:
    """Find the arguments in `A=1 python -m sglang.launch_server ...`, `sglang serve ...`,

    `docker run -e A=1 IMAGE python3 -m sglang.launch_server ...`, or bare arguments. One word with
    blanks is split as a shell would. Raises CommandError when there is no SGLang command in it.
    """
    words = shlex.split(words[0]) if len(words) == 1 and " " in words[0] else list(words)
    words = [word for word in words if word not in ("\n", "\\")]
    begin = _arguments_begin(words)
    before = words[:begin]
    environment: dict[str, str] = {}
    launcher: list[str] = []
    for place, word in enumerate(before):
        assignment = _ASSIGNMENT.fullmatch(word)
        after_e = place > 0 and before[place - 1] in ("-e", "--env")
        if assignment and (after_e or not launcher):
            environment[assignment[1]] = assignment[2]
        elif word in ("env", "nohup", "exec") and not launcher:
            continue
        else:
            launcher.append(word)
    return Command(environment, _program(launcher), tuple(words[begin:]))


def _arguments_begin(words: list[str]) -> int:
    for place, word in enumerate(words):
        if word in _MODULES or Path(word).name == "launch_server.py":
            return place + 1
        if Path(word).name == "sglang" and words[place + 1 : place + 2] == ["serve"]:
            return place + 2
    if words and words[0].startswith("--"):
        return 0
    raise CommandError(
        "no SGLang command found: expected `python -m sglang.launch_server ARGUMENTS`, "
        "`sglang serve ARGUMENTS`, or the arguments alone"
    )


def _program(launcher: list[str]) -> tuple[str, ...]:
    """The last words before the arguments: what is left of `docker run ... IMAGE python -m ...`."""
    for place, word in enumerate(launcher):
        if re.fullmatch(r"python[\d.]*", Path(word).name) or Path(word).name == "sglang":
            return tuple(launcher[place:])
    return tuple(launcher)
