"""One base command line becomes the command line and environment of each variant."""

from __future__ import annotations

import pytest

from sglang_spec_ext.ops.bench.variants import (
    Variant,
    VariantError,
    check_base_command,
    command_for,
    environment_for,
    option_value,
    parse_variants,
    recorded_environment,
    redacted,
    warnings_for,
)

LAUNCH = ["python", "-m", "sglang.launch_server"]
TAIL = ["--decode-log-interval", "5", "--host", "127.0.0.1", "--port", "4321"]
OFF, ON, ADAPTIVE = Variant("off"), Variant("on"), Variant("adaptive")
SIXTEEN = Variant("threshold", 16)


def test_variants_keep_their_order() -> None:
    assert parse_variants("on, off,threshold=0,adaptive") == [
        ON,
        OFF,
        Variant("threshold", 0),
        ADAPTIVE,
    ]
    assert [variant.label for variant in (OFF, SIXTEEN)] == ["off", "threshold=16"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no variant"),
        (" , ", "no variant"),
        ("of", "unknown variant 'of'; known: off, on, threshold=N, adaptive"),
        ("off=1", "unknown variant"),
        ("threshold", "needs a number"),
        ("threshold=", "needs a number"),
        ("threshold=-1", "needs a number"),
        ("threshold=1.5", "needs a number"),
        ("threshold=²", "needs a number"),
        ("on,off,on", "'on' is given twice"),
        ("threshold=8,threshold=08", "given twice"),
    ],
)
def test_bad_variants_are_named(text: str, complaint: str) -> None:
    with pytest.raises(VariantError, match=complaint):
        parse_variants(text)


@pytest.mark.parametrize(
    ("variant", "options", "expected"),
    [
        (OFF, ["--model-path", "m"], ["--model-path", "m"]),
        (
            OFF,
            ["--speculative-algorithm", "EAGLE3", "--tp", "2", "--speculative-num-steps=3"],
            ["--tp", "2"],
        ),
        # values of a stripped option go with it, whatever their number
        (OFF, ["--speculative-x", "1", "2", "-3", "--tp", "2"], ["--tp", "2"]),
        (OFF, ["--speculative-adaptive", "--tp", "2"], ["--tp", "2"]),
        (
            OFF,
            ["--cuda-graph-bs", "1", "2", "--speculative-disable-batch-threshold", "4"],
            ["--cuda-graph-bs", "1", "2"],
        ),
        (
            ON,
            [
                *("--speculative-algorithm", "EAGLE3", "--speculative-adaptive"),
                *("--speculative-adaptive-config", "f.json", "--speculative-num-steps", "3"),
                *("--speculative-disable-batch-threshold=4", "--tp", "2"),
                *("--speculative-resume-batch-threshold", "2"),
                *("--speculative-min-steps-between-switches", "9"),
            ],
            [
                *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
                *("--tp", "2"),
            ],
        ),
        (
            SIXTEEN,
            ["--speculative-disable-batch-threshold", "4", "--tp", "2"],
            ["--tp", "2", "--speculative-disable-batch-threshold", "16"],
        ),
        (
            SIXTEEN,
            ["--speculative-adaptive", "--speculative-resume-batch-threshold", "8"],
            [
                *("--speculative-resume-batch-threshold", "8"),
                *("--speculative-disable-batch-threshold", "16"),
            ],
        ),
        (
            ADAPTIVE,
            [
                *("--speculative-adaptive-config", "f.json"),
                *("--speculative-disable-batch-threshold", "4"),
            ],
            ["--speculative-adaptive-config", "f.json", "--speculative-adaptive"],
        ),
        (
            ADAPTIVE,
            ["--speculative-adaptive", "--tp", "2"],
            ["--speculative-adaptive", "--tp", "2"],
        ),
        # the address is ours to choose
        (ON, ["--host", "0.0.0.0", "--port=30000", "--tp", "2"], ["--tp", "2"]),
    ],
)
def test_command_lines(variant: Variant, options: list[str], expected: list[str]) -> None:
    assert command_for(variant, LAUNCH + options, 4321) == LAUNCH + expected + TAIL


def test_a_log_interval_of_the_user_stays() -> None:
    command = command_for(OFF, [*LAUNCH, "--decode-log-interval", "3"], 1)
    assert command.count("--decode-log-interval") == 1
    assert option_value(command, "--decode-log-interval") == "3"


def test_thresholds_by_environment_variable_do_not_leak() -> None:
    environ = {
        "PATH": "/bin",
        "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "4",
        "SGLANG_SPEC_EXT_RESUME_BATCH_THRESHOLD": "2",
        "SGLANG_SPEC_EXT_MIN_STEPS_BETWEEN_SWITCHES": "1",
    }
    for variant in (OFF, ON, ADAPTIVE):
        assert set(environment_for(variant, environ)) == {"PATH", "PYTHONUNBUFFERED"}
    kept = environment_for(SIXTEEN, environ)
    assert "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD" not in kept
    assert kept["SGLANG_SPEC_EXT_RESUME_BATCH_THRESHOLD"] == "2"


@pytest.mark.parametrize(
    ("options", "variants", "complaint"),
    [
        (["--config", "f.yaml"], [OFF], "--config"),
        (["--config=f.yaml"], [OFF], "--config"),
        ([], [OFF, ON], "no --speculative-algorithm"),
        ([], [SIXTEEN], "no --speculative-algorithm"),
    ],
)
def test_base_commands_that_cannot_be_varied(
    options: list[str], variants: list[Variant], complaint: str
) -> None:
    with pytest.raises(VariantError, match=complaint):
        check_base_command(LAUNCH + options, variants)


def test_off_alone_needs_no_speculative_arguments() -> None:
    check_base_command(LAUNCH, [OFF])


@pytest.mark.parametrize(
    ("options", "variants", "concurrency", "warns"),
    [
        ([], [OFF, ON], [1, 64], True),
        ([], [OFF, ON], [1, 48], False),
        ([], [OFF], [1, 64], False),
        (["--max-running-requests", "64"], [OFF, ON], [1, 64], False),
    ],
)
def test_the_hidden_admission_cap_is_announced(
    options: list[str], variants: list[Variant], concurrency: list[int], warns: bool
) -> None:
    assert bool(warnings_for(LAUNCH + options, variants, concurrency)) is warns


def test_the_last_value_counts() -> None:
    argv = [*LAUNCH, "--port", "1", "--port=2", "--flag"]
    assert option_value(argv, "--port") == "2"
    assert option_value(argv, "--flag") is None
    assert option_value(argv, "--absent") is None


def test_secrets_are_not_recorded() -> None:
    argv = [*LAUNCH, "--api-key", "s3cret", "--admin-api-key=s3cret", "--tp", "2"]
    assert "s3cret" not in " ".join(redacted(argv))
    assert redacted(argv)[-2:] == ["--tp", "2"]
    environ = {"SGLANG_X": "1", "SGLANG_HUB_TOKEN": "s3cret", "HOME": "/h", "SGLANG_API_KEY": "k"}
    assert recorded_environment(environ) == {"SGLANG_X": "1"}
