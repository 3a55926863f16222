"""Read arguments against a flag table as argparse does, but tell all errors and not the first."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_spec_ext.args import CHECK_FLAG, CHECK_KEYWORD, FLAGS, KEYWORDS
from sglang_spec_ext.compat.releases import RELEASES, describe
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity
from sglang_spec_ext.ops.preflight.config_file import CONFIG_FLAG, ConfigFile, Entry
from sglang_spec_ext.ops.preflight.flags import Flag, FlagTable, recorded, releases_with_flag
from sglang_spec_ext.ops.preflight.foreign import FOREIGN_FLAGS, SPECULATIVE_CONFIG

NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")  # what argparse takes for a negative number
OURS = (
    *(Flag((name,), KEYWORDS[field_name], type="int") for field_name, name in FLAGS.items()),
    Flag((CHECK_FLAG,), CHECK_KEYWORD),
)
OUR_FLAGS = tuple(name for flag in OURS for name in flag.names)


@dataclass
class Reading:
    """``values`` are what was given, by destination, ``written`` the flag as it was written.

    ``canonical`` are the arguments with full names, known renames applied. ``file`` and ``entry``
    are the configuration file and the key in it that are being read; None for the command line.
    """

    table: FlagTable
    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    canonical: dict[str, list[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    file: ConfigFile | None = None
    entry: Entry | None = None
    from_file: set[str] = field(default_factory=set)

    def get(self, dest: str, default: Any = None) -> Any:
        """The value given, else the release's default, else ``default``."""
        if dest in self.values:
            return self.values[dest]
        flag = self.table.by_dest.get(dest)
        return default if flag is None or flag.default is None else flag.default

    def say(self, rule: str, severity: Severity, message: str, fix: str = "") -> None:
        if self.file is not None and self.entry is not None:
            message = f"{self.file.path}, key {self.entry.key}: {message}"
        self.findings.append(Finding(rule, severity, message, fix))

    def spelled(self, name: str) -> str:
        """A flag's name as it is to be written at this place."""
        return name if self.entry is None else f"the key {name.removeprefix('--')}"


def read_arguments(
    arguments: Sequence[str], table: FlagTable, file: ConfigFile | None = None
) -> Reading:
    """Read all words; what is wrong with them is in the reading's findings.

    SGLang puts what comes from a file in front, so the command line has the last word.
    """
    reading = Reading(table, file=file)
    for entry in file.entries if file is not None else ():
        reading.entry = entry
        _read_entry(reading, entry)
    reading.entry = None
    _read_words(reading, list(arguments))
    for flag in table.flags:
        if flag.required and flag.dest not in reading.values:
            reading.say("missing-flag", Severity.ERROR, f"{flag.name} is required", "add it")
    return reading


def _read_entry(reading: Reading, entry: Entry) -> None:
    """One key of the file; what YAML or SGLang make of its value may not be what was meant."""
    if entry.error:
        reading.say(
            "config-key",
            Severity.ERROR,
            f"SGLang {reading.table.release} stops at it ({entry.error})",
            "quote it, a key is the name of a flag"
            if entry.error.startswith("AttributeError")
            else f"take it out of the file and write --{entry.key} on the command line",
        )
        return
    flag = reading.table.find(f"--{entry.key}")
    if entry.kind == "NoneType":
        reading.say(
            "config-value",
            Severity.ERROR if flag and flag.type in ("int", "float") else Severity.WARNING,
            "it has no value: SGLang takes the text 'None'",
            "give it a value, or drop the key",
        )
        return
    if entry.kind == "dict" and flag is None:
        reading.say(
            "config-key",
            Severity.ERROR,
            "it is a section, and no flag of SGLang has this name",
            "write all keys at the top level: the file is flat",
        )
        return
    if entry.kind == "dict" and not _is_json(entry.words[-1]):
        reading.say(
            "config-value",
            Severity.ERROR,
            f"SGLang {reading.table.release} makes Python's text of a nested value, no JSON",
            f"write the value as one quoted text of JSON: {entry.key}: '{{...}}'",
        )
    if entry.kind == "bool" and flag is not None and flag.takes_value and flag.type == "str":
        refused = bool(flag.choices) or flag.name in OUR_FLAGS
        reading.say(
            "config-value",
            Severity.ERROR if refused else Severity.WARNING,
            f"YAML reads yes, no, on and off as true or false: SGLang gets {entry.words[-1]!r}",
            "quote the value, or correct it",
        )
        if refused:
            return
    _read_words(reading, list(entry.words))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _read_words(reading: Reading, words: list[str]) -> None:
    while words:
        word = words.pop(0)
        if word.startswith("--") and len(word) > 2:
            _read_flag(reading, word, words)
        elif word == "-h":
            _say_help(reading, word)
        else:
            reading.say(
                "stray-word",
                Severity.ERROR,
                f"{word!r} belongs to no flag; SGLang refuses it",
                "give one value, and no list"
                if reading.entry is not None
                else "quote values with blanks, and check that the flag before it takes a value",
            )


def _say_help(reading: Reading, word: str) -> None:
    reading.say("help", Severity.ERROR, f"{word} prints the help and starts nothing", "drop it")


def _read_flag(reading: Reading, word: str, words: list[str]) -> None:
    name, equals, inline = word.partition("=")
    if name == "--help":
        _take_values(words, "?")
        _say_help(reading, name)
        return
    flag = _resolve(reading, name)
    if flag is None:
        if not equals:
            _take_values(words, "*")
        return
    if not flag.takes_value:
        if equals:
            fix = f"write {reading.spelled(flag.name)}"
            reading.say("flag-value", Severity.ERROR, f"{name} takes no value", fix)
        _store(reading, flag, name, not name.startswith("--no-") or flag.kind != "boolean", [])
        return
    values = [inline] if equals else _take_values(words, flag.nargs)
    if not values and flag.nargs not in ("?", "*"):
        reading.say("missing-value", Severity.ERROR, f"{name} needs a value", "add it")
        return
    converted = [_convert(reading, flag, name, value) for value in values]
    single = flag.nargs in (None, "?") and converted
    _store(reading, flag, name, converted[0] if single else converted, values)


def _store(reading: Reading, flag: Flag, name: str, value: Any, words: list[str]) -> None:
    before = reading.values.get(flag.dest)
    differs = flag.dest in reading.values and before != value and flag.kind != "append"
    if flag.name == CONFIG_FLAG:
        reading.say(
            "config-ignored",
            Severity.ERROR,
            f"SGLang does not read {' '.join(words)}: it looks for {CONFIG_FLAG} as a word of its "
            "own on the command line",
            "drop it" if reading.entry is not None else f"write {CONFIG_FLAG} {' '.join(words)}",
        )
        return
    if differs and flag.dest in reading.from_file and reading.entry is None:
        assert reading.file is not None
        reading.say(
            "config-overridden",
            Severity.NOTE,
            f"{name} {_shown(value)} on the command line counts, not {_shown(before)} of "
            f"{reading.file.path}",
        )
    elif differs:
        reading.say(
            "given-twice",
            Severity.WARNING,
            f"{reading.written[flag.dest]} and {name} give two values, {before!r} and {value!r}; "
            "the last one counts",
            "drop one",
        )
    if flag.deprecated:
        reading.say(
            "deprecated",
            Severity.NOTE,
            f"{flag.name} is deprecated in SGLang {reading.table.release}",
        )
    if reading.entry is not None:
        reading.from_file.add(flag.dest)
    reading.values[flag.dest] = value
    reading.written[flag.dest] = name
    shown = name if flag.kind == "boolean" and name in flag.names else flag.name
    reading.canonical[flag.dest] = [shown, *words]


def _resolve(reading: Reading, name: str) -> Flag | None:
    """The flag that argparse would take, or None after saying what is wrong."""
    table = reading.table
    exact = table.find(name)
    if exact is not None:
        return exact
    candidates = [each for each in table.beginning_with(name) if each not in OUR_FLAGS]
    flags = {table.find(each) for each in candidates}
    if len(candidates) == 1:
        _say_abbreviated(reading, name, candidates[0])
        return flags.pop()
    # `--speculative-model` is somebody's habit and no abbreviation, however many flags it begins.
    known = name.replace("_", "-")
    if known in FOREIGN_FLAGS or known == SPECULATIVE_CONFIG or table.find(known):
        return _foreign(reading, name, known)
    if candidates:
        reading.say(
            "ambiguous",
            Severity.ERROR,
            f"{name} could be {', '.join(candidates[:6])}{' ...' if len(candidates) > 6 else ''}",
            "write the flag in full",
        )
        return None
    _say_unknown(reading, name)
    return None


def _say_abbreviated(reading: Reading, name: str, full: str) -> None:
    """A habit such as `--tp` is fine; what other releases understand differently is not."""
    elsewhere = [
        release
        for release in RELEASES
        if recorded(release).find(full) and recorded(release).beginning_with(name) != [full]
    ]
    message = f"{name} is taken for {full}"
    if elsewhere:
        message += f", but not in SGLang {describe(elsewhere) or 'as recorded'}"
    severity = Severity.WARNING if elsewhere else Severity.NOTE
    fix = f"write {reading.spelled(full)}" if elsewhere else ""
    reading.say("abbreviated", severity, message, fix)


def _foreign(reading: Reading, name: str, known: str) -> Flag | None:
    """A name that is known from elsewhere: read on as if the right one had been written."""
    table = reading.table
    right = known if table.find(known) else FOREIGN_FLAGS.get(known)
    if known == SPECULATIVE_CONFIG:
        reading.say(
            "foreign-flag",
            Severity.ERROR,
            f"{name} is vLLM's; SGLang has one flag per value",
            "write --speculative-algorithm, --speculative-draft-model-path, "
            "--speculative-num-steps, --speculative-eagle-topk, --speculative-num-draft-tokens",
        )
        return None
    flag = table.find(right) if right else None
    if flag is None:
        others = releases_with_flag(known)
        where = f" (known to SGLang {describe(others) or 'all recorded'})" if others else ""
        reading.say(
            "foreign-flag",
            Severity.ERROR,
            f"{name} is no flag of SGLang {table.release}{where}",
            "drop it: SGLang does this by itself or not at all" if not right else f"see {right}",
        )
        return None
    counts = ""
    if known == "--num-speculative-tokens":
        counts = "; SGLang counts the root token too, so it is one more than vLLM's number"
    reading.say(
        "foreign-flag",
        Severity.ERROR,
        f"{name} is no flag of SGLang {table.release}{counts}",
        f"write {reading.spelled(flag.name)}",
    )
    return flag


def _say_unknown(reading: Reading, name: str) -> None:
    table = reading.table
    others = releases_with_flag(name)
    close = difflib.get_close_matches(name, table.names, n=1, cutoff=0.75)
    if name in OUR_FLAGS:
        message = (
            f"{name} comes with the sglang-spec-ext plugin, which the server's Python does not load"
        )
        fix = "install sglang-spec-ext there, and check SGLANG_PLUGINS"
    elif others:
        message = f"SGLang {table.release} has no {name}; {describe(others)} have"
        fix = f"drop it, or use one of these releases{f'; close: {close[0]}' if close else ''}"
    else:
        message = f"no SGLang release that is known has {name}"
        fix = f"did you mean {reading.spelled(close[0])}?" if close else "drop it"
    reading.say("unknown-flag", Severity.ERROR, message, fix)


def _take_values(words: list[str], nargs: str | int | None) -> list[str]:
    """The words that argparse would give to a flag."""
    limit = {None: 1, "?": 1, "*": len(words), "+": len(words)}.get(
        nargs if not isinstance(nargs, int) else "int", nargs if isinstance(nargs, int) else 1
    )
    taken: list[str] = []
    while words and len(taken) < limit and _is_value(words[0]):
        taken.append(words.pop(0))
    return taken


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word == "-" or bool(NUMBER.match(word)) or " " in word


def _convert(reading: Reading, flag: Flag, name: str, text: str) -> Any:
    value: Any = text
    try:
        if flag.type == "int":
            value = int(text)
        elif flag.type == "float":
            value = float(text)
        elif flag.type == "other" and re.fullmatch(r"-?\d+", text):
            value = int(text)  # SGLang's own integer types, some of which also take 4k or 1M
    except ValueError:
        kind = "a whole number" if flag.type == "int" else "a number"
        reading.say("bad-value", Severity.ERROR, f"{name} {text!r} is not {kind}", "correct it")
    if flag.choices and text not in flag.choices:
        close = difflib.get_close_matches(text, flag.choices, n=1)
        reading.say(
            "bad-value",
            Severity.ERROR,
            f"{name} {text!r} is none of the values of SGLang {reading.table.release}",
            f"did you mean {close[0]}?" if close else f"one of: {_shortened(flag.choices)}",
        )
    return value


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _shortened(choices: tuple[str, ...]) -> str:
    return ", ".join(choices[:12]) + (", ..." if len(choices) > 12 else "")
