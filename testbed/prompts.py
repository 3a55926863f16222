"""The language of the tiny models, and prompts in it. Standard library only.

A text is a row of words. Each word is the successor of the word 16 places before it: a line of 16
words repeats with every word moved one place along its cycle (Monday -> Tuesday, one -> two).
The first 16 words are free. So the next word can only be told from the one 15 places back, and
whoever has not seen that place can only guess: that is what makes a cold draft visible.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

ORDER = 16
"""How many places back a word's predecessor is; also the number of free words at the start."""

CYCLES: tuple[tuple[str, ...], ...] = tuple(
    tuple(line.split())
    for line in (
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        "January February March April May June July August September October November December",
        "one two three four five six seven eight nine ten eleven twelve",
        "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
        "red orange yellow green blue indigo violet",
        "do re mi fa sol la ti",
        "north east south west",
        "spring summer autumn winter",
        "rock paper scissors",
    )
)
WORDS: tuple[str, ...] = tuple(word for cycle in CYCLES for word in cycle)

FIRST_WORD_ID = 259
"""Token id of ``WORDS[0]``; the others follow in order. Below it: 3 special tokens, 256 bytes."""

_SUCCESSOR = {
    word: cycle[(place + 1) % len(cycle)] for cycle in CYCLES for place, word in enumerate(cycle)
}
_ID_OF = {word: FIRST_WORD_ID + place for place, word in enumerate(WORDS)}
_NEXT_ID = {_ID_OF[word]: _ID_OF[successor] for word, successor in _SUCCESSOR.items()}


def continue_ids(ids: Sequence[int], count: int) -> list[int]:
    """The `count` token ids that the language puts after `ids`.

    Raises ValueError where nothing determines them: fewer than 16 ids, or an id that is no word.
    """
    if len(ids) < ORDER:
        raise ValueError(f"need at least {ORDER} ids to know what follows, got {len(ids)}")
    row = list(ids[-ORDER:])
    try:
        for _ in range(count):
            row.append(_NEXT_ID[row[-ORDER]])
    except KeyError as error:
        raise ValueError(f"token id {error} is not a word of the language") from None
    return row[ORDER:]


def prompt_ids(seed: int, length: int = ORDER) -> list[int]:
    """`length` token ids: a random start chosen by `seed`, continued by the language beyond 16.

    Prompts shorter than 16 leave the next word open: the target then spreads its probability over
    all words.
    """
    if length < 1:
        raise ValueError(f"a prompt has at least one token, got length={length}")
    start = random.Random(seed).choices(_word_ids(), k=ORDER)
    return start[:length] if length <= ORDER else start + continue_ids(start, length - ORDER)


def prompt_text(seed: int, length: int = ORDER) -> str:
    """`prompt_ids` as text; the tokenizer turns it into the same ids."""
    return text_of(prompt_ids(seed, length))


def text_of(ids: Sequence[int]) -> str:
    """Words of `ids`, separated by single spaces. Raises ValueError for an id that is no word."""
    for token in ids:
        if token not in _NEXT_ID:
            raise ValueError(f"token id {token} is not a word of the language")
    return " ".join(WORDS[token - FIRST_WORD_ID] for token in ids)


def _word_ids() -> range:
    return range(FIRST_WORD_ID, FIRST_WORD_ID + len(WORDS))
