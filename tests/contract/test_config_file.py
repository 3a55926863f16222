"""How each release reads `--config FILE.yaml`: our account of it against the release's own code."""

from __future__ import annotations

import argparse
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_spec_ext.compat.releases import RELEASES
from sglang_spec_ext.ops.preflight.config_file import entries
from sglang_spec_ext.ops.preflight.flags import Flag, FlagTable, recorded

PLACES = (
    "sglang/srt/utils/server_args_config_parser.py",  # from 0.5.19 on
    "sglang/srt/server_args_config_parser.py",
)
VALUES: list[Any] = [
    "text", "with blanks", 5, 0.5, True, False, None, [], [1, 2], ["a b", True], {"a": {"b": [1]}},
]  # fmt: skip


@pytest.fixture(scope="module", params=RELEASES)
def wheel(
    request: pytest.FixtureRequest, wheel_of: Callable[[str], Path]
) -> tuple[str, zipfile.ZipFile]:
    return request.param, zipfile.ZipFile(wheel_of(request.param))


class Odd(argparse.Action):
    """Any action of SGLang's own."""


def parser_of(flags: tuple[Flag, ...]) -> argparse.ArgumentParser:
    """A parser with these flags, as far as the reader of the file looks at them."""
    parser = argparse.ArgumentParser()
    for flag in flags:
        own = flag.deprecated or flag.dest == "lora_paths"
        if flag.kind == "boolean":
            options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        elif flag.kind == "store_true" and own:
            options = {"action": Odd, "nargs": 0}
        elif flag.kind in ("store", "append"):
            options = {"action": Odd if own else flag.kind, "nargs": flag.nargs}
        else:
            options = {"action": flag.kind}
        names = flag.names[:1] if flag.kind == "boolean" else flag.names
        parser.add_argument(*names, dest=flag.dest, **options)
    return parser


def merger_of(archive: zipfile.ZipFile, table: FlagTable) -> Any:
    place = next(place for place in PLACES if place in archive.namelist())
    module: dict[str, Any] = {"__name__": "merger"}
    exec(compile(archive.read(place), place, "exec"), module)
    return module["ConfigArgumentMerger"](parser_of(table.flags))


def test_the_words_for_every_key_are_those_of_the_release(
    wheel: tuple[str, zipfile.ZipFile],
) -> None:
    release, archive = wheel
    table = recorded(release)
    merger = merger_of(archive, table)
    names = {name.removeprefix("--") for name in table.names if name.startswith("--")}
    keys = {*names, *(name.replace("-", "_") for name in names), *table.by_dest, "nobody"}
    refused = 0
    for key in sorted(keys - {"help"}):
        for value in VALUES if key in ("port", "trust-remote-code", "nobody") else (True, "x"):
            (entry,) = entries({key: value}, table)
            try:
                expected = tuple(merger._convert_config_to_args({key: value}))
            except ValueError as error:
                assert entry.error and "Unsupported config option" in str(error), (key, entry)
                refused += 1
            else:
                assert (entry.words, entry.error) == (expected, ""), (key, value)
    assert refused > 0
    (entry,) = entries({5: "x"}, table)
    with pytest.raises(AttributeError, match=re.escape(entry.error.partition(": ")[2])):
        merger._convert_config_to_args({5: "x"})


def test_actions_of_its_own_are_known_by_what_is_recorded(
    wheel: tuple[str, zipfile.ZipFile],
) -> None:
    """They are recognised as deprecated, or as the one flag that is not."""
    _, archive = wheel
    text = archive.read("sglang/srt/server_args.py").decode()
    actions = set(re.findall(r"\baction=([A-Z]\w+)", text))
    assert {name for name in actions if not name.startswith("Deprecated")} <= {"LoRAPathAction"}


def test_the_file_is_put_in_front_of_the_command_line(
    wheel: tuple[str, zipfile.ZipFile], tmp_path: Path
) -> None:
    release, archive = wheel
    path = tmp_path / "c.yaml"
    path.write_text("port: 5\n")
    merger = merger_of(archive, recorded(release))
    words = ["--tp", "2", "--config", str(path), "--port", "6"]
    assert merger.merge_config_with_args(words) == ["--port", "5", "--tp", "2", "--port", "6"]
    text = archive.read("sglang/srt/server_args.py").decode()
    assert 'if "--config" in argv:' in text, "found as a word of its own only"
