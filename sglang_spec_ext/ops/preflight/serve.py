"""What `sglang serve` does with its arguments before it hands them to the server's parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_spec_ext.compat.releases import RELEASES
from sglang_spec_ext.ops.preflight.command_line import Command

MODEL_TYPE = "--model-type"
MODEL_TYPE_SINCE = "0.5.10.post1"
MODEL_AS_WORD_SINCE = "0.5.16"
MODEL_FLAGS = ("--model-path", "--model")


@dataclass(frozen=True)
class Served:
    """``arguments`` are what the server's parser sees, ``own`` what `serve` keeps for itself."""

    arguments: tuple[str, ...]
    own: tuple[str, ...] = ()


def is_serve(command: Command) -> bool:
    return command.launcher[-1:] == ("serve",)


def served(command: Command, release: str) -> Served:
    """Split the arguments of a command for ``release`` (one of RELEASES)."""
    if not is_serve(command):
        return Served(command.arguments)
    place = RELEASES.index(release)
    own: list[str] = []
    rest: list[str] = []
    words = list(command.arguments)
    while words:
        word = words.pop(0)
        knows = place >= RELEASES.index(MODEL_TYPE_SINCE)
        if knows and word == MODEL_TYPE and words:
            own = [word, words.pop(0)]
        elif knows and word.startswith(f"{MODEL_TYPE}="):
            own = [word]
        else:
            rest.append(word)
    if place >= RELEASES.index(MODEL_AS_WORD_SINCE) and rest and not rest[0].startswith("-"):
        rest.insert(0, MODEL_FLAGS[0])
    return Served(tuple(rest), tuple(own))


def names_model(arguments: Sequence[str]) -> bool:
    """Whether `serve`, which looks for the model itself and in no file, would find it."""
    return any(word.partition("=")[0] in MODEL_FLAGS for word in arguments)
