"""Print the flags of the SGLang beside this interpreter as JSON. Run as a script, never imported.

With `--config FILE` also the words that its own reader makes of each key of that file.

Runs in the server's own environment, where this package need not be installed, so it uses the
standard library and SGLang only. The caller hides all GPUs from it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys

BEGIN, END = "<<<flags", "flags>>>"
KINDS = {
    argparse._StoreTrueAction: "store_true",
    argparse._StoreFalseAction: "store_false",
    argparse._StoreConstAction: "store_const",
    argparse._AppendAction: "append",
}


def describe(action: argparse.Action) -> dict[str, object]:
    """One flag: names, and what argparse checks about its value."""
    kind = KINDS.get(type(action), "store")
    if isinstance(action, getattr(argparse, "BooleanOptionalAction", ())):
        kind = "boolean"
    elif action.nargs == 0 and kind == "store":
        kind = "store_true"  # SGLang's own actions without a value, for deprecated flags
    known = {"int": "int", "float": "float", "str": "str"}
    found: dict[str, object] = {
        "names": list(action.option_strings),
        "dest": action.dest,
        "kind": kind,
        "type": known.get(getattr(action.type, "__name__", "str"), "other"),
    }
    if action.nargs not in (None, 0):
        found["nargs"] = action.nargs
    if action.choices is not None:
        choices = [str(choice) for choice in action.choices]
        # The order of a set differs from process to process.
        found["choices"] = (
            sorted(choices) if isinstance(action.choices, (set, frozenset)) else choices
        )
    if action.required:
        found["required"] = True
    if isinstance(action.default, (int, float, str)) and action.default != argparse.SUPPRESS:
        found["default"] = action.default
    if type(action).__name__.startswith("Deprecated"):
        found["deprecated"] = True
    return found


def read_config(parser: argparse.ArgumentParser, path: str) -> dict[str, object]:
    """`{"entries": [[key, words, error, type of the value], ...]}` or `{"error": words}`.

    Empty where this release reads its file in a way that is not known here.
    """
    try:
        try:
            from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
        except ImportError:  # before 0.5.19
            from sglang.srt.server_args_config_parser import ConfigArgumentMerger
        merger = ConfigArgumentMerger(parser)
        load, convert = merger._parse_yaml_config, merger._convert_config_to_args
    except (ImportError, AttributeError, TypeError):
        return {}
    try:
        values = load(path)
    except Exception as error:  # whatever it is, the server would stop at it
        return {"error": str(error) or type(error).__name__}
    entries = []
    for key, value in values.items():
        words, problem = [], ""
        try:
            words = convert({key: value})
        except Exception as error:
            problem = str(error) if isinstance(error, ValueError) else repr(error)
        entries.append([str(key), words, problem, type(value).__name__])
    return {"entries": entries}


def main() -> None:
    out, noise = sys.stdout, io.StringIO()
    with contextlib.redirect_stdout(noise):
        import sglang

        if "--plugins" in sys.argv:
            with contextlib.suppress(ImportError):
                from sglang.srt.plugins import load_plugins

                load_plugins()
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
    flags = [
        describe(action)
        for action in parser._actions
        if action.option_strings and "--help" not in action.option_strings
    ]
    found: dict[str, object] = {"version": sglang.__version__, "flags": flags}
    if "--config" in sys.argv:
        with contextlib.redirect_stdout(noise):
            found["config"] = read_config(parser, sys.argv[sys.argv.index("--config") + 1])
    print(BEGIN, json.dumps(found), END, sep="\n", file=out, flush=True)


if __name__ == "__main__":
    main()
