"""Rules about lm_head, vocabularies and the map between them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_spec_ext.ops.check_draft.edits import SetConfig, SetIntegers
from sglang_spec_ext.ops.check_draft.finding import FixBy, Severity
from sglang_spec_ext.ops.check_draft.pair import Hit, Pair, RuleBook
from sglang_spec_ext.ops.check_draft.tensors import is_integer
from sglang_spec_ext.ops.check_draft.token_map import Reading, TokenMap

RULES = RuleBook()

MAX_VOCABULARY = 16 << 20  # entries; a longer map is no map

# --- lm_head ----------------------------------------------------------------------------------


@RULES.rule("draft-vocab-size-missing", Severity.ERROR)
def draft_vocab_missing(pair: Pair) -> Iterator[Hit]:
    if pair.is_llama_eagle3 and "draft_vocab_size" not in pair.config.values:
        rows = pair.head_rows
        yield Hit(
            "config.json has no draft_vocab_size; SGLang asks for it and stops (null means: "
            "borrow the target's lm_head)",
            f'--convert writes "draft_vocab_size": {"null" if rows is None else rows}',
            FixBy.CONVERT,
            edits=(SetConfig({"draft_vocab_size": rows}),),
        )


@RULES.rule("lm-head-tied", Severity.ERROR)
def head_tied(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle3 and pair.config.tied and pair.head is not None:
        yield Hit(
            "tie_word_embeddings is true, so SGLang takes the target's embedding for the lm_head "
            "and skips the draft's own",
            '--convert writes "tie_word_embeddings": false',
            FixBy.CONVERT,
            edits=(SetConfig({"tie_word_embeddings": False}),),
        )


@RULES.rule("lm-head-missing", Severity.ERROR)
def head_missing(pair: Pair) -> Iterator[Hit]:
    size = pair.draft_vocab_size
    if not pair.is_eagle3 or pair.config.tied or pair.head is not None or size is None:
        return
    full = size == pair.config.vocab_size and pair.d2t is None and pair.config.borrows_embedding
    yield Hit(
        f"draft_vocab_size is {size}, so SGLang makes the draft its own lm_head, but the file has "
        "none: it stays random",
        '--convert writes "draft_vocab_size": null, which borrows the target\'s'
        if full
        else "get a checkpoint with its lm_head",
        FixBy.CONVERT if full else FixBy.AUTHOR,
        edits=(SetConfig({"draft_vocab_size": None}),) if full else (),
    )


@RULES.rule("lm-head-rows", Severity.ERROR)
def head_rows(pair: Pair) -> Iterator[Hit]:
    rows, size = pair.head_rows, pair.draft_vocab_size
    if not pair.is_eagle3 or pair.config.tied or rows is None or size is None or rows == size:
        return
    mapped = pair.d2t.shape[0] if pair.d2t and pair.d2t.shape else pair.config.vocab_size
    sure = rows == mapped
    yield Hit(
        f"lm_head has {rows} rows, draft_vocab_size is {size}; SGLang stops while loading",
        f'--convert writes "draft_vocab_size": {rows}' if sure else "make the two agree",
        FixBy.CONVERT if sure else FixBy.AUTHOR,
        edits=(SetConfig({"draft_vocab_size": rows}),) if sure else (),
    )


@RULES.rule("lm-head-ignored", Severity.WARNING)
def head_ignored(pair: Pair) -> Iterator[Hit]:
    own = pair.is_eagle3 and pair.head is not None and not pair.config.tied
    if own and pair.draft_vocab_size is None:
        yield Hit(
            "draft_vocab_size is null, so SGLang puts the target's lm_head in place of the "
            "draft's own",
            f'if the draft\'s was trained, write "draft_vocab_size": {pair.head_rows}',
            FixBy.AUTHOR,
        )


@RULES.rule("lm-head-borrowed", Severity.NOTE)
def head_borrowed(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle or (pair.is_eagle3 and pair.head is None and _borrows_head(pair)):
        yield Hit("lm_head is borrowed from the target")


@RULES.rule("lm-head-borrowed-width", Severity.ERROR)
def head_borrowed_width(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle3 and _borrows_head(pair) and not pair.config.borrows_embedding:
        yield Hit(
            f"lm_head is borrowed from the target, whose states are "
            f"{pair.config.target_hidden_size} wide; the draft's are {pair.config.hidden_size}",
            "get a draft with its own lm_head",
            FixBy.AUTHOR,
        )


# --- d2t --------------------------------------------------------------------------------------


@RULES.rule("d2t-missing", Severity.ERROR)
def d2t_missing(pair: Pair) -> Iterator[Hit]:
    size = pair.draft_vocab_size
    if not pair.is_eagle3 or pair.d2t is not None or pair.head is None or pair.config.tied:
        return
    if size is not None and size < pair.vocab_size:
        yield Hit(
            f"the draft's vocabulary is {size} of {pair.vocab_size} tokens and there is no "
            "d2t; SGLang takes draft ids for target ids",
            "get the d2t that belongs to this lm_head",
            FixBy.AUTHOR,
        )


@RULES.rule("d2t-borrowed-head", Severity.ERROR)
def d2t_borrowed(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle3 and pair.d2t is not None and _borrows_head(pair):
        token_map = _token_map(pair)
        if token_map is None or any(token_map.values):
            yield Hit(
                "there is a d2t, but the lm_head is the target's: its ids are target ids already, "
                "and SGLang maps them once more",
                "state draft_vocab_size and bring the draft's lm_head, or remove d2t",
                FixBy.AUTHOR,
            )


@RULES.rule("d2t-dtype", Severity.ERROR)
def d2t_dtype(pair: Pair) -> Iterator[Hit]:
    if not pair.is_eagle3 or pair.d2t is None or pair.d2t.dtype is None:
        return
    if not is_integer(pair.d2t.dtype):
        yield Hit(
            f"{pair.d2t.name} is {pair.d2t.dtype}; SGLang indexes with it and needs integers",
            "store it as int64",
            FixBy.AUTHOR,
        )


@RULES.rule("d2t-shape", Severity.ERROR)
def d2t_shape(pair: Pair) -> Iterator[Hit]:
    if not pair.is_eagle3 or pair.d2t is None or pair.d2t.shape is None:
        return
    size = pair.head_rows or pair.draft_vocab_size
    shape = pair.d2t.shape
    if len(shape) != 1 or (size is not None and shape[0] != size and not _borrows_head(pair)):
        yield Hit(
            f"{pair.d2t.name} is {list(shape)}, the draft's vocabulary has {size} tokens",
            "get the d2t that belongs to this lm_head",
            FixBy.AUTHOR,
        )


@RULES.rule("d2t-absolute", Severity.ERROR)
def d2t_absolute(pair: Pair) -> Iterator[Hit]:
    token_map = _token_map(pair)
    if token_map is None or pair.d2t is None or token_map.reading is not Reading.ABSOLUTE:
        return
    if _borrows_head(pair):
        return
    first = token_map.values[-1]
    yield Hit(
        f"{pair.d2t.name} holds target ids; SGLang adds the draft id to each "
        f"(the last, {first}, would become {token_map.ids[-1]} of {token_map.vocab_size})",
        "--convert writes offsets",
        FixBy.CONVERT,
        edits=(SetIntegers(pair.d2t.name, token_map.offsets, "target ids to offsets"),),
    )


@RULES.rule("d2t-ambiguous", Severity.WARNING)
def d2t_ambiguous(pair: Pair) -> Iterator[Hit]:
    token_map = _token_map(pair)
    if token_map is not None and token_map.reading is Reading.AMBIGUOUS:
        yield Hit(
            "d2t makes sense as offsets and as target ids, and no t2d tells which; SGLang takes "
            "offsets",
            "ask the author; if they are target ids, subtract 0, 1, 2, ...",
            FixBy.AUTHOR,
        )


@RULES.rule("d2t-range", Severity.ERROR)
def d2t_range(pair: Pair) -> Iterator[Hit]:
    token_map = _token_map(pair)
    if token_map is None or token_map.reading is Reading.ABSOLUTE:
        return
    wrong = token_map.out_of_range
    if wrong:
        yield Hit(
            f"d2t maps {len(wrong)} draft ids out of the vocabulary of {token_map.vocab_size} "
            f"(for example to {wrong[-1]}); on a GPU that is an illegal access",
            "this d2t belongs to another target, or is broken",
            FixBy.AUTHOR,
        )


@RULES.rule("d2t-duplicates", Severity.WARNING)
def d2t_duplicates(pair: Pair) -> Iterator[Hit]:
    token_map = _token_map(pair)
    if token_map is None or token_map.reading is Reading.ABSOLUTE:
        return
    if token_map.repeats:
        yield Hit(
            f"d2t maps {token_map.repeats} draft ids to a target id that another one has already",
            "check how d2t was made; a map never repeats an id",
            FixBy.AUTHOR,
        )


@RULES.rule("d2t-zero", Severity.WARNING)
def d2t_zero(pair: Pair) -> Iterator[Hit]:
    token_map = _token_map(pair)
    if token_map is None or any(token_map.values) or token_map.mask is not None:
        return
    if len(token_map.values) < token_map.vocab_size:
        yield Hit(
            f"d2t is all zeros: the draft's vocabulary is simply the first "
            f"{len(token_map.values)} target ids, as if the map had never been filled",
            "check how d2t was made",
            FixBy.AUTHOR,
        )


@RULES.rule("d2t-t2d", Severity.ERROR)
def d2t_t2d(pair: Pair) -> Iterator[Hit]:
    token_map = _token_map(pair)
    if token_map is not None and token_map.mask is not None and not token_map.agrees_with_mask:
        yield Hit(
            f"t2d marks {len(token_map.mask)} target ids, d2t maps {len(token_map.values)} draft "
            "ids to others; the lm_head was trained with one of them",
            "get both from the run that trained the draft",
            FixBy.AUTHOR,
        )


@RULES.rule("t2d-size", Severity.ERROR)
def t2d_size(pair: Pair) -> Iterator[Hit]:
    t2d = pair.t2d
    if not pair.is_eagle3 or t2d is None or t2d.shape is None:
        return
    if t2d.shape != (pair.config.vocab_size,):
        yield Hit(
            f"{t2d.name} is {list(t2d.shape)}, the vocabulary has {pair.config.vocab_size} tokens",
            "this draft was made for another vocabulary, or vocab_size is wrong",
            FixBy.AUTHOR,
        )


@RULES.rule("token-map", Severity.WARNING)
def token_map_flag(pair: Pair) -> Iterator[Hit]:
    if pair.is_eagle3 and pair.server.token_map:
        yield Hit(
            "SGLang ignores --speculative-token-map for EAGLE-3 drafts, which carry their own d2t",
            "remove the flag",
            FixBy.SERVER,
        )


# --- draft and target -------------------------------------------------------------------------


@RULES.rule("vocab-size", Severity.ERROR, needs_target=True)
def vocabularies(pair: Pair) -> Iterator[Hit]:
    if not (pair.is_eagle3 or pair.is_eagle):
        return
    ours, theirs = pair.config.vocab_size, pair.target.vocab_size
    if ours != theirs and not _pads(pair):
        yield Hit(
            f"vocab_size is {ours}, the target's {theirs}",
            "this draft belongs to another target",
            FixBy.AUTHOR,
        )


@RULES.rule("vocab-size-padded", Severity.WARNING, needs_target=True)
def padded(pair: Pair) -> Iterator[Hit]:
    """Padding does no harm where ids go through d2t and the embedding is the target's."""
    if _pads(pair):
        yield Hit(
            f"vocab_size is {pair.config.vocab_size}, the target's {pair.target.vocab_size}; d2t "
            "stays within the target's, so this is padding or another tokenizer",
            "make sure that both were made with one tokenizer",
            FixBy.AUTHOR,
        )


@RULES.rule("tokenizer", Severity.WARNING, needs_target=True)
def tokenizer(pair: Pair) -> Iterator[Hit]:
    """Only the target's tokenizer is used; another one beside the draft is a bad sign."""
    if not (pair.is_eagle3 or pair.is_eagle):
        return
    ours, theirs = pair.draft.path / "tokenizer.json", pair.target.path / "tokenizer.json"
    if not ours.is_file() or not theirs.is_file() or _digest(ours) == _digest(theirs):
        return
    mine, target = _token_ids(ours), _token_ids(theirs)
    if mine is None or target is None or mine == target:
        return
    other = sum(1 for token, number in mine.items() if target.get(token) != number)
    yield Hit(
        f"the tokenizer beside the draft has {len(mine)} tokens, the target's {len(target)}; "
        f"{other} of them have other ids or none there",
        "this draft was probably trained for another target",
        FixBy.AUTHOR,
    )


def _borrows_head(pair: Pair) -> bool:
    return pair.config.tied or pair.draft_vocab_size is None


def _pads(pair: Pair) -> bool:
    if not pair.is_eagle3 or pair.config.vocab_size == pair.target.vocab_size:
        return False
    if _borrows_head(pair) or not pair.config.borrows_embedding:
        return False
    token_map = _token_map(pair)
    return token_map is not None and not token_map.out_of_range


def _token_map(pair: Pair) -> TokenMap | None:
    """The map of an EAGLE-3 draft, where it can be read as one."""
    d2t = pair.d2t
    if not pair.is_eagle3 or d2t is None or d2t.shape is None or len(d2t.shape) != 1:
        return None
    if not is_integer(d2t.dtype) or not 0 < d2t.numel <= MAX_VOCABULARY:
        return None
    return TokenMap(tuple(d2t.integers()), pair.vocab_size, _mask(pair))


def _mask(pair: Pair) -> frozenset[int] | None:
    t2d = pair.t2d
    if t2d is None or t2d.dtype not in ("BOOL", "U8") or t2d.shape != (pair.config.vocab_size,):
        return None
    if t2d.numel > MAX_VOCABULARY:
        return None
    return frozenset(number for number, marked in enumerate(t2d.integers()) if marked)


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _token_ids(file: Path) -> dict[str, int] | None:
    """Tokens and their ids in a tokenizer.json; None for a kind that is not understood."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [token, score] by id
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
        return {**vocabulary, **added}
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
