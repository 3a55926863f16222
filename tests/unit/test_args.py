"""The settings: what is valid, through which doors they come, and that old spellings keep."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_spec_ext import args
from sglang_spec_ext.args import Settings, SettingsError

N_FLAG = "--speculative-disable-batch-threshold"
M_FLAG = "--speculative-resume-batch-threshold"
K_FLAG = "--speculative-min-steps-between-switches"

# The flags of this family in SGLang, spelled out so that the test needs no SGLang.
SGLANG_FLAGS = (
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-draft-model-revision",
    "--speculative-draft-attention-backend",
    "--speculative-dflash-block-size",
    "--speculative-num-steps",
    "--speculative-num-draft-tokens",
    "--speculative-ngram-match-type",
    "--speculative-eagle-topk",
    "--speculative-moe-runner-backend",
    "--speculative-adaptive",
    "--speculative-accept-threshold-single",
    "--speculative-token-map",
    "--random-seed",
)


def sglang_like_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="server")
    for flag in SGLANG_FLAGS:
        parser.add_argument(flag)
    return parser


# ---------------------------------------------------------------------------- what is valid


def test_nothing_asked_for_is_no_settings() -> None:
    assert args.build() is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"threshold": 16}, Settings(16, 16, 4)),
        ({"threshold": "16"}, Settings(16, 16, 4)),
        ({"threshold": " 16 "}, Settings(16, 16, 4)),
        ({"threshold": 0}, Settings(0, 0, 4)),
        ({"threshold": "0", "resume_threshold": "0"}, Settings(0, 0, 4)),
        ({"threshold": 16, "resume_threshold": 12}, Settings(16, 12, 4)),
        ({"threshold": 16, "resume_threshold": 0}, Settings(16, 0, 4)),
        ({"threshold": 16, "resume_threshold": 16}, Settings(16, 16, 4)),
        ({"threshold": 16, "min_steps": 1}, Settings(16, 16, 1)),
        ({"threshold": "8", "resume_threshold": "4", "min_steps": "9"}, Settings(8, 4, 9)),
    ],
)
def test_valid_values(raw: dict[str, Any], expected: Settings) -> None:
    assert args.build(**raw) == expected


BAD_NUMBERS: list[Any] = ["-1", "", "  ", "many", "4.0", "1e3", "4,5", "0x10", "1_6"]
BAD_NUMBERS += [-1, 4.0, True, False, [4]]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("field", "flag", "least"),
    [("threshold", N_FLAG, 0), ("resume_threshold", M_FLAG, 0), ("min_steps", K_FLAG, 1)],
)
def test_bad_number(field: str, flag: str, least: int, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        args.build(**{"threshold": 16, field: value})
    assert str(caught.value) == (
        f"{flag} {value!r} is not a whole number >= {least}. Example: {N_FLAG} 16"
    )


def test_min_steps_zero_is_below_its_least() -> None:
    with pytest.raises(SettingsError, match=f"{K_FLAG} 0 is not a whole number >= 1"):
        args.build(threshold=4, min_steps=0)


def test_resume_above_disable() -> None:
    with pytest.raises(SettingsError) as caught:
        args.build(threshold="4", resume_threshold="5")
    message = str(caught.value)
    assert message.startswith(f"{M_FLAG} 5 is above {N_FLAG} 4: ")
    assert "resume at a batch size at which it is switched off" in message
    example = message.split("Example: ")[1].split()
    assert example == [N_FLAG, "16", M_FLAG, "12"]


@pytest.mark.parametrize(
    ("field", "flag", "value"),
    [("resume_threshold", M_FLAG, 4), ("min_steps", K_FLAG, "2"), ("resume_threshold", M_FLAG, 0)],
)
def test_the_others_need_the_threshold(field: str, flag: str, value: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        args.build(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{flag} {value} has no effect without {N_FLAG}")
    assert message.endswith(f"Example: {N_FLAG} 16")


def test_the_example_in_every_message_is_correct() -> None:
    for raw in ({"threshold": "x"}, {"min_steps": 1}, {"threshold": 1, "resume_threshold": 2}):
        with pytest.raises(SettingsError) as caught:
            args.build(**raw)
        parser = sglang_like_parser()
        args.add_flags(parser)
        example = str(caught.value).split("Example: ")[1].split()
        assert args.from_namespace(parser.parse_args(example)) is not None


# ---------------------------------------------------------------------------- the doors


def test_environment_door() -> None:
    environ = {
        "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "8",
        "SGLANG_SPEC_EXT_RESUME_BATCH_THRESHOLD": "6",
        "SGLANG_SPEC_EXT_MIN_STEPS_BETWEEN_SWITCHES": "2",
    }
    assert args.from_env(environ) == Settings(8, 6, 2)
    assert args.from_env({}) is None
    assert args.from_env({"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "0"}) == Settings(0, 0, 4)


def test_an_empty_variable_is_one_that_is_not_set() -> None:
    assert args.from_env({"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": ""}) is None


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (
            {"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "lots"},
            "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD 'lots'",
        ),
        (
            {"SGLANG_SPEC_EXT_RESUME_BATCH_THRESHOLD": "3"},
            "SGLANG_SPEC_EXT_RESUME_BATCH_THRESHOLD 3 has no effect without "
            "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD",
        ),
    ],
)
def test_a_bad_variable_is_called_by_its_own_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        args.from_env(environ)
    assert str(caught.value).startswith(named)


def test_keywords_are_taken_out_and_the_rest_stays() -> None:
    kwargs = {
        "model_path": "m",
        "speculative_disable_batch_threshold": 8,
        "speculative_resume_batch_threshold": 6,
        "speculative_min_steps_between_switches": 2,
    }
    assert args.pop_keywords(kwargs) == Settings(8, 6, 2)
    assert kwargs == {"model_path": "m"}
    assert args.pop_keywords(kwargs) is None


def test_a_bad_keyword_is_called_by_its_own_name() -> None:
    with pytest.raises(SettingsError, match=r"^speculative_disable_batch_threshold True is not"):
        args.pop_keywords({"speculative_disable_batch_threshold": True})


def test_worker_environment_round_trip() -> None:
    settings = Settings(8, 6, 2)
    assert args.from_worker_env(settings.to_env()) == settings
    assert args.from_worker_env({}) is None
    # the launcher's door and the worker's are two: a set door must not make a worker
    assert args.from_worker_env({"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "8"}) is None


class Record:
    """Stands for ServerArgs."""


def test_the_stamp_travels_by_pickle() -> None:
    record = Record()
    assert args.read_stamp(record) is None
    args.stamp(record, Settings(8, 6, 2))
    assert args.read_stamp(pickle.loads(pickle.dumps(record))) == Settings(8, 6, 2)
    (value,) = vars(record).values()
    assert isinstance(value, str)


# ---------------------------------------------------------------------------- the command line


def parsed(*line: str) -> Settings | None:
    parser = sglang_like_parser()
    args.add_flags(parser)
    return args.from_namespace(parser.parse_args(list(line)))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ([], None),
        ([N_FLAG, "4"], Settings(4, 4, 4)),
        ([f"{N_FLAG}=4"], Settings(4, 4, 4)),
        ([K_FLAG, "7", M_FLAG, "2", N_FLAG, "4"], Settings(4, 2, 7)),
        (["--speculative-alg", "EAGLE3", N_FLAG, "0"], Settings(0, 0, 4)),
    ],
)
def test_flags_to_settings(line: list[str], expected: Settings | None) -> None:
    assert parsed(*line) == expected


def test_a_bad_flag_value_is_our_error_not_a_usage_screen() -> None:
    with pytest.raises(SettingsError, match=f"{N_FLAG} 'four' is not a whole number"):
        parsed(N_FLAG, "four")


def test_a_namespace_of_another_parser_has_no_settings() -> None:
    assert args.from_namespace(argparse.Namespace(model_path="m")) is None


def test_help_shows_the_flags_and_their_defaults() -> None:
    parser = sglang_like_parser()
    args.add_flags(parser)
    text = "".join(parser.format_help().split())  # argparse breaks lines within a flag
    for flag, metavar in ((N_FLAG, "N"), (M_FLAG, "M"), (K_FLAG, "K")):
        assert f"{flag}{metavar}" in text
    assert f"Default:thevalueof{N_FLAG}." in text
    assert "Default:4." in text
    assert "Needs--speculative-algorithm." in text


def prefixes_of(flags: tuple[str, ...]) -> list[str]:
    return sorted({flag[:end] for flag in flags for end in range(3, len(flag) + 1)})


def meaning(parser: argparse.ArgumentParser, prefix: str) -> Any:
    """What the parser makes of one spelling: the values it sets, or its complaint."""

    class Complaint(Exception):
        pass

    def error(message: str) -> None:
        raise Complaint(message)

    parser.error = error  # type: ignore[assignment, method-assign]
    try:
        namespace = vars(parser.parse_args([prefix, "7"]))
    except Complaint as complaint:
        return str(complaint)
    return {name: value for name, value in namespace.items() if value == "7"}


def test_every_prefix_means_what_it_meant_before() -> None:
    before, after = sglang_like_parser(), sglang_like_parser()
    args.add_flags(after)
    changed = {
        prefix: (meaning(before, prefix), meaning(after, prefix))
        for prefix in prefixes_of((*SGLANG_FLAGS, N_FLAG, M_FLAG, K_FLAG))
        if prefix not in (N_FLAG, M_FLAG, K_FLAG)
        and meaning(before, prefix) != meaning(after, prefix)
    }
    assert changed == {}


def test_an_old_prefix_that_our_flags_share_still_works() -> None:
    # without the guard, our flags would be further candidates for both
    parser = sglang_like_parser()
    args.add_flags(parser)
    assert meaning(parser, "--speculative-m") == {"speculative_moe_runner_backend": "7"}
    assert meaning(parser, "--r") == {"random_seed": "7"}


@pytest.mark.parametrize("flag", [N_FLAG, M_FLAG, K_FLAG])
def test_our_flags_are_matched_by_their_full_name_only(flag: str) -> None:
    parser = sglang_like_parser()
    args.add_flags(parser)
    assert meaning(parser, flag) == {flag[2:].replace("-", "_"): "7"}
    assert "unrecognized arguments" in meaning(parser, flag[:-1])


_REAL_PARSER = f"""
import argparse, json, sys
from sglang_spec_ext import args
from sglang.srt.server_args import ServerArgs

def parser():
    made = argparse.ArgumentParser(prog="server")
    ServerArgs.add_cli_args(made)
    return made

before, after = parser(), parser()
assert "{N_FLAG}" not in before._option_string_actions
args.add_flags(after)

def meaning(parser, spelling):
    return sorted({{match[0].dest for match in parser._get_option_tuples(spelling)}})

flags = [f for f in after._option_string_actions if f.startswith("--")]
spellings = {{flag[:end] for flag in flags for end in range(3, len(flag) + 1)}}
changed = [s for s in spellings if meaning(before, s) != meaning(after, s)]
print(json.dumps({{"spellings": len(spellings), "changed": sorted(changed),
                   "help": all(f in after.format_help() for f in args.FLAGS.values())}}))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: no real parser"
)
def test_every_prefix_of_the_real_parser_means_what_it_meant_before() -> None:
    # a process of its own: importing SGLang is heavy and leaves much behind
    done = subprocess.run(
        [sys.executable, "-c", _REAL_PARSER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["spellings"] > 1000
    assert report["changed"] == []
    assert report["help"]


def test_settings_need_neither_sglang_nor_torch() -> None:
    code = (
        "import sys, sglang_spec_ext.args, sglang_spec_ext.policy, sglang_spec_ext.refusals;"
        "print([m for m in ('sglang', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_settings_are_read_off_any_record() -> None:
    assert args.read_stamp(SimpleNamespace()) is None


# ---------------------------------------------------------------------------- while serving

N, M, K = (args.KEYWORDS[field] for field in ("threshold", "resume_threshold", "min_steps"))


@pytest.mark.parametrize(
    ("current", "asked", "expected"),
    [
        pytest.param(Settings(4, 4), {N: 8}, Settings(8, 8), id="M goes with N where it was N"),
        pytest.param(Settings(4, 4), {N: 2}, Settings(2, 2), id="downwards too"),
        pytest.param(Settings(8, 4), {N: 6}, Settings(6, 4), id="another M stays"),
        pytest.param(Settings(8, 8), {M: 4}, Settings(8, 4), id="M alone"),
        pytest.param(Settings(8, 4), {N: 2, M: 1}, Settings(2, 1), id="both"),
        pytest.param(Settings(8, 4, 9), {N: 9}, Settings(9, 4, 9), id="K stays"),
        pytest.param(Settings(8, 4), {K: 9}, Settings(8, 4, 9), id="K alone"),
        pytest.param(Settings(8, 4), {N: 0, M: 0}, Settings(0, 0), id="never speculate"),
        pytest.param(Settings(8, 4), {N: 16}, Settings(16, 4), id="as far as there are graphs"),
    ],
)
def test_what_a_change_leads_to(
    current: Settings, asked: dict[str, Any], expected: Settings
) -> None:
    assert args.changed(current, asked, largest_threshold=16) == expected


def test_a_change_is_refused_in_the_words_of_the_start() -> None:
    with pytest.raises(SettingsError, match=f"{M} 4 is above {N} 3: speculation would resume"):
        args.changed(Settings(8, 4), {N: 3})
    with pytest.raises(SettingsError, match=f"{K} 0 is not a whole number >= 1"):
        args.changed(Settings(8, 4), {K: 0})


def test_no_threshold_above_the_captured_graphs() -> None:
    with pytest.raises(SettingsError, match=f"{N} 17 is above 16.* Start it with {N_FLAG} 17"):
        args.changed(Settings(8, 8), {N: 17}, largest_threshold=16)
    assert args.changed(Settings(8, 8), {N: 17}) == Settings(17, 17)
