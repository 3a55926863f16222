"""Prompts: the same for every variant, from files of several shapes, refused by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_spec_ext.ops.bench.prompts import (
    PromptsError,
    PromptSource,
    RandomIds,
    load_prompts,
    vocab_size_of,
)


def test_random_ids_follow_the_seed() -> None:
    prompts = RandomIds(length=16, vocab_size=1000)
    first = prompts.for_level(3, seed=1)
    assert first == prompts.for_level(3, seed=1)
    assert first != prompts.for_level(3, seed=2)
    assert [len(prompt["input_ids"]) for prompt in first] == [16, 16, 16]
    assert all(100 <= token < 900 for prompt in first for token in prompt["input_ids"])


@pytest.mark.parametrize("vocab_size", [2, 3, 9, 10])
def test_tiny_vocabularies(vocab_size: int) -> None:
    for prompt in RandomIds(50, vocab_size).for_level(2, seed=0):
        assert all(0 <= token < vocab_size for token in prompt["input_ids"])


def test_text_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('one\n\n  {"text": "not parsed here"}\n')
    prompts = load_prompts(path)
    assert prompts.uses_text
    assert [prompt["text"] for prompt in prompts.prompts] == [
        "one",
        '  {"text": "not parsed here"}',
    ]
    assert prompts.description == "prompts.txt, 2 prompts"


def test_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n[3]\n"four"\n{"prompt": "five"}\n{"text": "six"}\n')
    assert load_prompts(path).prompts == [
        {"input_ids": [1, 2]},
        {"input_ids": [3]},
        {"text": "four"},
        {"text": "five"},
        {"text": "six"},
    ]


@pytest.mark.parametrize(
    "line", ["{", "{}", "[]", '""', "[1.5]", "[true]", '["a"]', "7", '{"text": 7}', '{"text": ""}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"good"\n{line}\n')
    with pytest.raises(PromptsError, match=r"prompts\.jsonl:2 "):
        load_prompts(path)


def test_files_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match="No such file"):
        load_prompts(tmp_path / "absent")
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(PromptsError, match="no prompt"):
        load_prompts(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptsError, match="UTF-8"):
        load_prompts(tmp_path / "binary")


def test_a_short_file_is_reused_evenly(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a\nb\nc\n")
    prompts = load_prompts(path)
    chosen = [prompt["text"] for prompt in prompts.for_level(6, seed=3)]
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]
    assert chosen == [prompt["text"] for prompt in prompts.for_level(6, seed=3)]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 512}', 512),
        ('{"text_config": {"vocab_size": 99}}', 99),
        ("{}", None),
        ("{", None),
        (None, None),
    ],
)
def test_vocabulary_of_a_model_folder(tmp_path: Path, config: str | None, size: int | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert vocab_size_of(str(tmp_path)) == size


def test_prompts_that_a_server_cannot_answer(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps("text"))
    source = PromptSource(load_prompts(path), 128, None)
    assert source.for_server({}).for_level(1, 0) == [{"text": "text"}]
    with pytest.raises(PromptsError, match="--skip-tokenizer-init"):
        source.for_server({"skip_tokenizer_init": True})
    with pytest.raises(PromptsError, match="--vocab-size"):
        PromptSource(None, 128, None).for_server({"model_path": "org/model"})
    assert PromptSource(None, 4, 100).for_server({}) == RandomIds(4, 100)
