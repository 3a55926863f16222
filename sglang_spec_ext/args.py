"""The three settings: where they come from, what is valid, how they reach the scheduler process.

Torch-free and SGLang-free, so that every process and every tool can import it for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

THRESHOLD_FLAG = "--speculative-disable-batch-threshold"
RESUME_FLAG = "--speculative-resume-batch-threshold"
MIN_STEPS_FLAG = "--speculative-min-steps-between-switches"
EXAMPLE = f"{THRESHOLD_FLAG} 16"

DEFAULT_MIN_STEPS = 4

# Launchers that can pass neither a flag nor a keyword argument set these instead.
ENV_NAMES = {
    "threshold": "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD",
    "resume_threshold": "SGLANG_SPEC_EXT_RESUME_BATCH_THRESHOLD",
    "min_steps": "SGLANG_SPEC_EXT_MIN_STEPS_BETWEEN_SWITCHES",
}
FLAGS = {"threshold": THRESHOLD_FLAG, "resume_threshold": RESUME_FLAG, "min_steps": MIN_STEPS_FLAG}
# Engine(**kwargs) and argparse destinations use the flag's own name.
KEYWORDS = {name: flag[2:].replace("-", "_") for name, flag in FLAGS.items()}

# What becomes of errors that `check-draft` finds before weights load.
CHECK_FLAG = "--speculative-draft-check"
CHECK_KEYWORD = "speculative_draft_check"
CHECK_ENV = "SGLANG_SPEC_EXT_DRAFT_CHECK"
CHECK_MODES = ("stop", "warn", "off")

# The launcher hands the settings to the processes that it spawns through this one.
WORKER_ENV = "SGLANG_SPEC_EXT_WORKER"
# Algorithms that draft from hidden states of some of the target's layers: its class may lack the
# hooks that they call, and is given them whether or not there is a flag of ours.
CAPTURING = ("EAGLE3", "DFLASH")
# Those with a draft model, which `check-draft` knows or which capture.
DRAFTING = (*CAPTURING, "EAGLE", "NEXTN")
# "0" leaves SGLang's model classes alone; "1" is for launchers whose arguments we do not see.
HOOKS_ENV = "SGLANG_SPEC_EXT_EAGLE3_HOOKS"
# The launcher tells the processes that it spawns what a server with a draft gets in any case.
DRAFTING_WORKER_ENV = "SGLANG_SPEC_EXT_DRAFTING_WORKER"
# Attribute on ServerArgs: an underscore name survives SGLang's sealing and pickling, and a plain
# string survives every place that serialises the record.
RECORD_ATTRIBUTE = "_spec_ext"

_HELP = {
    "threshold": (
        "Decode with the target model alone while more than this many requests are decoding, and "
        "speculate again when the load falls. 0 never speculates. Needs --speculative-algorithm."
    ),
    "resume_threshold": (
        "Speculate again when at most this many requests are decoding. "
        f"Default: the value of {THRESHOLD_FLAG}."
    ),
    "min_steps": (
        "After a switch to target-only, stay there for at least this many decode steps; the switch "
        f"to target-only itself is never delayed. Default: {DEFAULT_MIN_STEPS}."
    ),
}


class SettingsError(ValueError):
    """A setting that cannot be used; the message names the flag, the value, the reason, a fix."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        threshold: N, decode requests above which only the target runs (>= 0).
        resume_threshold: M, decode requests at or below which speculation resumes (0 <= M <= N).
        min_steps: K, least decode steps between a switch to target-only and the way back (>= 1).
    """

    threshold: int
    resume_threshold: int
    min_steps: int = DEFAULT_MIN_STEPS

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))

    def to_env(self) -> dict[str, str]:
        """Environment of a process that is to run the worker with these settings."""
        return {WORKER_ENV: self.to_json()}


def build(
    threshold: Any = None,
    resume_threshold: Any = None,
    min_steps: Any = None,
    names: Mapping[str, str] = FLAGS,
) -> Settings | None:
    """Settings out of raw values (numbers or digits), or None when nothing was asked for.

    Args:
        names: what to call each value in an error (flag, keyword or environment variable).

    Raises:
        SettingsError: with the flag, the value, the reason and a correct example.
    """
    if threshold is None:
        for field, value in (("resume_threshold", resume_threshold), ("min_steps", min_steps)):
            if value is not None:
                raise SettingsError(
                    f"{names[field]} {value} has no effect without {names['threshold']}, which "
                    f"sets the batch size above which speculation is off. Example: {EXAMPLE}"
                )
        return None
    n = _integer(names["threshold"], threshold, at_least=0)
    m = n
    if resume_threshold is not None:
        m = _integer(names["resume_threshold"], resume_threshold, at_least=0)
    if m > n:
        raise SettingsError(
            f"{names['resume_threshold']} {m} is above {names['threshold']} {n}: speculation would "
            "resume at a batch size at which it is switched off. "
            f"Example: {EXAMPLE} {RESUME_FLAG} 12"
        )
    k = DEFAULT_MIN_STEPS
    if min_steps is not None:
        k = _integer(names["min_steps"], min_steps, at_least=1)
    return Settings(n, m, k)


def changed(
    current: Settings, asked: Mapping[str, Any], largest_threshold: int | None = None
) -> Settings:
    """What a running server is to go on with.

    Where M is not given, it follows N if the two were equal, and stays as it is otherwise.

    Args:
        asked: new values by keyword (see KEYWORDS).
        largest_threshold: the highest N that the captured CUDA graphs allow, None for any.

    Raises:
        SettingsError: as `build` does, or because graphs are missing.
    """
    now: dict[str, Any] = asdict(current)
    if current.resume_threshold == current.threshold:
        now["resume_threshold"] = None
    values = {field: asked.get(keyword, now[field]) for field, keyword in KEYWORDS.items()}
    settings = build(**values, names=KEYWORDS)
    assert settings is not None
    if largest_threshold is not None and settings.threshold > largest_threshold:
        raise SettingsError(
            f"{KEYWORDS['threshold']} {settings.threshold} is above {largest_threshold}, the "
            "largest batch for which this server has captured the CUDA graphs of speculation. "
            f"Start it with {THRESHOLD_FLAG} {settings.threshold} instead."
        )
    return settings


def _integer(name: str, value: Any, at_least: int) -> int:
    # bool is an int, and True as a threshold is a mistake, not 1
    number = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and "_" not in value:  # which int() skips: 1_6 would be 16
        try:
            number = int(value.strip())
        except ValueError:
            number = None
    if number is None or number < at_least:
        raise SettingsError(
            f"{name} {value!r} is not a whole number >= {at_least}. Example: {EXAMPLE}"
        )
    return number


def from_env(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Settings that a launcher passed through ``SGLANG_SPEC_EXT_*`` variables."""
    raw: dict[str, Any] = {f: environ.get(name) or None for f, name in ENV_NAMES.items()}
    return build(names=ENV_NAMES, **raw)


def from_worker_env(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """Settings that the launcher process handed to this spawned process, if it did."""
    text = environ.get(WORKER_ENV)
    return Settings.from_json(text) if text else None


def wants_hooks(algorithm: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a server with this ``--speculative-algorithm`` gets hooks for its target.

    Raises:
        SettingsError: the variable that switches them off and on holds something else.
    """
    given = environ.get(HOOKS_ENV, "").strip()
    if given not in ("", "0", "1"):
        raise SettingsError(
            f"{HOOKS_ENV} {given!r} is neither 0 nor 1. Example: {HOOKS_ENV}=0 leaves SGLang's "
            "model classes as they are"
        )
    return given == "1" or (given == "" and str(algorithm or "").upper() in CAPTURING)


@dataclass(frozen=True)
class Drafting:
    """What a server with a draft gets with or without our flags.

    Attributes:
        hooks: the target gets the hooks that its class lacks.
        check: one of CHECK_MODES; "off" also stops the look at accepted drafts.
    """

    hooks: bool
    check: str


def drafts(algorithm: Any) -> bool:
    """Whether a server with this ``--speculative-algorithm`` has a draft that we look at."""
    return str(algorithm or "").upper() in DRAFTING


def drafting_to_env(hooks: bool, check: str) -> dict[str, str]:
    return {DRAFTING_WORKER_ENV: json.dumps(asdict(Drafting(hooks, check)))}


def drafting_from_worker_env(environ: Mapping[str, str] = os.environ) -> Drafting | None:
    text = environ.get(DRAFTING_WORKER_ENV)
    return Drafting(**json.loads(text)) if text else None


def draft_check(given: Any = None, environ: Mapping[str, str] = os.environ) -> str:
    """One of CHECK_MODES, out of a flag's or keyword's value or else the environment.

    Raises:
        SettingsError: it is none of them.
    """
    name, value = (CHECK_FLAG, given) if given is not None else (CHECK_ENV, environ.get(CHECK_ENV))
    mode = str(value or CHECK_MODES[0]).strip().lower()
    if mode not in CHECK_MODES:
        raise SettingsError(
            f"{name} {value!r} is none of {', '.join(CHECK_MODES)}. Example: {CHECK_FLAG} warn "
            "starts the server whatever is wrong with the draft"
        )
    return mode


def pop_keywords(kwargs: MutableMapping[str, Any]) -> Settings | None:
    """Take our keyword arguments out of ``Engine(**kwargs)``."""
    raw: dict[str, Any] = {field: kwargs.pop(keyword, None) for field, keyword in KEYWORDS.items()}
    return build(**raw, names=KEYWORDS)


def from_namespace(namespace: argparse.Namespace) -> Settings | None:
    raw: dict[str, Any] = {
        field: getattr(namespace, keyword, None) for field, keyword in KEYWORDS.items()
    }
    return build(**raw)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags so that every spelling that the parser accepted before still means the same."""
    group = parser.add_argument_group("sglang_spec_ext")
    for (field, flag), metavar in zip(FLAGS.items(), "NMK", strict=True):
        group.add_argument(flag, type=str, default=None, metavar=metavar, help=_HELP[field])
    group.add_argument(
        CHECK_FLAG,
        type=str,
        default=None,
        metavar="MODE",
        help="Before weights load, check the draft as `sglang-spec-ext check-draft` does, and on "
        "errors stop (default), or only warn, or off: do not check.",
    )
    _never_abbreviate(parser)


def _never_abbreviate(parser: argparse.ArgumentParser) -> None:
    # argparse accepts unique prefixes; a new flag can make an old prefix ambiguous. Ours are
    # therefore matched by their full name only, which argparse looks up before prefixes.
    ours = {*KEYWORDS.values(), CHECK_KEYWORD}
    original = parser._get_option_tuples

    def without_ours(option_string: str) -> list[Any]:
        return [match for match in original(option_string) if match[0].dest not in ours]

    parser._get_option_tuples = without_ours  # type: ignore[method-assign]


def stamp(record: Any, settings: Settings) -> None:
    """Put the settings on a ServerArgs record; they travel with it by pickle."""
    setattr(record, RECORD_ATTRIBUTE, settings.to_json())


def read_stamp(record: Any) -> Settings | None:
    text = getattr(record, RECORD_ATTRIBUTE, None)
    return Settings.from_json(text) if text else None
