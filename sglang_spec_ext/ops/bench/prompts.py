"""What the requests ask: lines of a file, or seeded random token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Special tokens sit at the ends of most vocabularies; random ids stay in the middle.
_LOW, _HIGH = 0.1, 0.9


class PromptsError(ValueError):
    """The prompts cannot be read or used; the message names the fix."""


class Prompts(Protocol):
    def for_level(self, count: int, seed: int) -> list[dict[str, Any]]:
        """``count`` prompts as request fields (``text`` or ``input_ids``); same seed, same
        prompts, so that every variant answers the same questions."""


@dataclass(frozen=True)
class RandomIds:
    """Prompts of ``length`` ids each, below ``vocab_size``. Real text drafts better: random ids
    understate the accept length unless acceptance is simulated."""

    length: int
    vocab_size: int

    def for_level(self, count: int, seed: int) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        low, high = int(self.vocab_size * _LOW), max(int(self.vocab_size * _HIGH), 1)
        return [
            {"input_ids": [rng.randrange(low, high) for _ in range(self.length)]}
            for _ in range(count)
        ]


@dataclass(frozen=True)
class FilePrompts:
    """Prompts of a file, in an order drawn by seed, reused when there are fewer than requests."""

    description: str
    prompts: Sequence[dict[str, Any]]

    @property
    def uses_text(self) -> bool:
        return any("text" in prompt for prompt in self.prompts)

    def for_level(self, count: int, seed: int) -> list[dict[str, Any]]:
        rng = random.Random(seed)
        chosen: list[dict[str, Any]] = []
        while len(chosen) < count:
            chosen += rng.sample(self.prompts, len(self.prompts))
        return chosen[:count]


def load_prompts(path: Path) -> FilePrompts:
    """One prompt per line; a ``.jsonl`` line is a string, a list of ids, or an object with
    ``text``, ``prompt`` or ``input_ids``. Raises PromptsError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PromptsError(f"cannot read prompts from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptsError(f"{path} is not UTF-8 text: {error}") from error
    parse = _from_json if path.suffix == ".jsonl" else _from_text
    prompts = [parse(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptsError(f"{path} holds no prompt; write one per line")
    return FilePrompts(f"{path.name}, {len(prompts)} prompts", prompts)


@dataclass(frozen=True)
class PromptSource:
    """What the user asked for: a file, or random ids of ``length``. Which prompts that makes
    depends on the server: on its vocabulary, and on whether it tokenizes."""

    file: FilePrompts | None
    length: int
    vocab_size: int | None

    @property
    def description(self) -> str:
        return self.file.description if self.file else f"random ids, {self.length} tokens"

    def for_server(self, info: Mapping[str, Any]) -> FilePrompts | RandomIds:
        """``info``: ``model_path`` and ``skip_tokenizer_init`` of the server, as it reports them.

        Raises PromptsError if it cannot answer these prompts.
        """
        if self.file:
            if self.file.uses_text and info.get("skip_tokenizer_init"):
                raise PromptsError(
                    "the server runs with --skip-tokenizer-init and cannot read text prompts; give "
                    "`input_ids` in a .jsonl file, or --input-ids-random"
                )
            return self.file
        size = self.vocab_size or vocab_size_of(str(info.get("model_path") or ""))
        if size is None:
            raise PromptsError(
                "cannot tell the model's vocabulary size (no config.json in a local --model-path); "
                "give --vocab-size, or --prompts FILE"
            )
        return RandomIds(self.length, size)


def vocab_size_of(model_path: str) -> int | None:
    """From the config.json of a local model folder, None if there is none to read."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _from_text(line: str, where: str) -> dict[str, Any]:
    return {"text": line}


def _from_json(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PromptsError(f"{where} is not JSON: {error}") from error
    if isinstance(value, dict):
        value = value.get("input_ids") or value.get("text") or value.get("prompt")
    if isinstance(value, str) and value:
        return {"text": value}
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return {"input_ids": value}
    raise PromptsError(
        f"{where} holds no prompt: want a string, a list of token ids, or an object with "
        "`text`, `prompt` or `input_ids`"
    )
