"""`check-draft` at boot: what stops a server, what warns, and what is left to SGLang."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draft_checkpoints import eagle3, llama_target

from sglang_spec_ext import args, draft_check
from sglang_spec_ext.args import SettingsError
from sglang_spec_ext.compat import releases


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed_version", lambda: "0.5.23")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return llama_target().write(tmp_path / "target")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return eagle3().write(tmp_path / "good")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A draft whose fc got lost: SGLang would leave it random and start."""
    draft = eagle3()
    del draft.tensors["fc.weight"]
    return draft.write(tmp_path / "bad")


def server(target: Path, draft: Path | None, **fields: Any) -> Any:
    given = {
        "model_path": str(target),
        "speculative_draft_model_path": str(draft) if draft else None,
        "speculative_algorithm": "EAGLE3",
        **fields,
    }
    return SimpleNamespace(**given)


def test_a_good_draft_is_not_mentioned(
    target: Path, good: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert draft_check.run(server(target, good), "stop") == []
    assert caplog.records == []


def test_errors_stop_the_server_and_name_the_way_out(target: Path, bad: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        draft_check.run(server(target, bad), "stop")
    text = str(caught.value)
    assert f"the draft {bad} would not draft as it was trained to:\n  - " in text
    assert f"sglang-spec-ext check-draft --target {target} --draft {bad}" in text
    assert "--speculative-draft-check warn" in text


def test_the_flag_turns_errors_into_warnings(
    target: Path, bad: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    found = draft_check.run(server(target, bad), "warn")
    assert found
    assert len(caplog.records) == len(found)
    assert "spec-ext: draft error: " in caplog.text


def test_off_reads_nothing(target: Path, bad: Path) -> None:
    assert draft_check.run(server(target, bad), "off") == []


@pytest.mark.parametrize("algorithm", ["DFLASH", "STANDALONE", None])
def test_only_the_drafts_that_check_draft_knows(
    target: Path, bad: Path, algorithm: str | None
) -> None:
    assert draft_check.run(server(target, bad, speculative_algorithm=algorithm), "stop") == []


def test_a_target_that_drafts_for_itself_is_not_checked(target: Path) -> None:
    assert draft_check.run(server(target, None), "stop") == []


def test_a_draft_that_is_still_to_be_downloaded_is_left_to_sglang(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert draft_check.run(server(target, tmp_path / "org" / "name"), "stop") == []
    assert "is not on this machine yet" in caplog.text


def test_a_draft_that_cannot_be_read_is_left_to_sglang(
    target: Path, good: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (good / "config.json").write_text("{")
    assert draft_check.run(server(target, good), "stop") == []
    assert "the draft is not checked before it loads" in caplog.text


def test_without_the_target_the_rest_is_checked(tmp_path: Path, bad: Path) -> None:
    with pytest.raises(SettingsError, match="would not draft"):
        draft_check.run(server(tmp_path / "not" / "here", bad), "stop")


def test_the_servers_arguments_reach_the_rules(
    target: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    options = draft_check.options_of(
        server(
            target,
            good,
            attention_backend="fa3",
            speculative_draft_attention_backend="triton",
            context_length=4096,
            speculative_token_map="map.pt",
            disable_cuda_graph=True,
        )
    )
    assert (options.target, options.draft) == (str(target), str(good))
    assert (options.attention_backend, options.draft_attention_backend) == ("fa3", "triton")
    assert (options.context_length, options.token_map) == (4096, "map.pt")
    assert (options.release, options.allow_longer_context) == ("0.5.23", True)
    assert (options.disable_cuda_graph, options.plugin) == (True, True)
    monkeypatch.setenv(args.HOOKS_ENV, "0")
    assert not draft_check.options_of(server(target, good)).plugin


# ---------------------------------------------------------------------------- the switches


def test_the_flag_wins_over_the_environment() -> None:
    assert args.draft_check(None, {}) == "stop"
    assert args.draft_check(None, {args.CHECK_ENV: "Warn"}) == "warn"
    assert args.draft_check("off", {args.CHECK_ENV: "warn"}) == "off"


@pytest.mark.parametrize("given", ["no", "1"])
def test_a_wrong_mode_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=f"{args.CHECK_FLAG} '{given}' is none of stop, warn"):
        args.draft_check(given, {})
    with pytest.raises(SettingsError, match=f"{args.CHECK_ENV} '{given}'"):
        args.draft_check(None, {args.CHECK_ENV: given})


def test_which_servers_get_hooks() -> None:
    assert args.wants_hooks("EAGLE3", {}) and args.wants_hooks("dflash", {})
    assert not any(args.wants_hooks(a, {}) for a in (None, "EAGLE", "NGRAM", "STANDALONE"))
    assert not args.wants_hooks("EAGLE3", {args.HOOKS_ENV: "0"})
    assert args.wants_hooks(None, {args.HOOKS_ENV: "1"})
    with pytest.raises(SettingsError, match=r"'off' is neither 0 nor 1"):
        args.wants_hooks("EAGLE3", {args.HOOKS_ENV: "off"})
