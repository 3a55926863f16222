"""Train and write the tiny target and its EAGLE-3 draft (``models/target``, ``models/draft``).

    python testbed/make_models.py [--output FOLDER]

Needs torch, transformers, tokenizers and safetensors (an environment with SGLang has them) and
about a minute and a half on two cores. Same seed, same machine: same weights. Both models learn
the language of `prompts.py`; a self-check refuses to write a pair that has not learned it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from testbed import prompts

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 4, 4, 2, 32
CONTEXT = 2048
NORM_EPS, ROPE_THETA = 1e-5, 10000.0
AUX_LAYERS = [0, 1, 2]  # the draft reads the outputs of these target layers
BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
# A draft without mistakes would leave rejection untested. This one cannot say some words at all and
# takes others for their successor more often than not, so that a second branch finds them.
UNKNOWN_TO_DRAFT = ("sol", "west")
CONFUSED_BY_DRAFT = ("spring", "south", "fa", "Earth", "Friday", "five")
CONFUSION = 0.6
IGNORED = -100  # the label that cross_entropy skips
UNROLL = 4  # draft steps trained per position; one more than the test bed's 3 speculative steps


# --------------------------------------------------------------------------------- tokenizer
def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text is representable, each word with its leading space is one token.

    Every merge extends a word's own prefix by one byte, so merges of different words cannot get in
    each other's way whatever their order.
    """
    byte_symbols = _byte_level_symbols()
    vocab = dict(SPECIAL_TOKENS)
    vocab.update({symbol: len(SPECIAL_TOKENS) + byte for byte, symbol in enumerate(byte_symbols)})
    assert len(vocab) == prompts.FIRST_WORD_ID
    space = byte_symbols[ord(" ")]
    spelled = [space + word for word in prompts.WORDS]
    vocab.update({word: len(vocab) + place for place, word in enumerate(spelled)})
    merges: dict[tuple[str, str], None] = {}
    for word in spelled:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
            vocab.setdefault(word[: end + 1], len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    for seed in range(20):
        ids = prompts.prompt_ids(seed, 40)
        assert tokenizer.encode(prompts.text_of(ids)).ids == ids, "words are not single tokens"
        assert tokenizer.decode(ids).strip() == prompts.text_of(ids)
    return tokenizer


def _byte_level_symbols() -> list[str]:
    """The printable stand-in of each byte 0..255 in byte-level BPE (the GPT-2 convention)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def draft_token_ids() -> Tensor:
    """Target ids that the draft can propose, ascending: the words, printable ASCII, the end."""
    first_byte = len(SPECIAL_TOKENS)
    ascii_ids = [first_byte + byte for byte in (ord("\n"), *range(32, 127))]
    known = [word for word in prompts.WORDS if word not in UNKNOWN_TO_DRAFT]
    return torch.tensor(sorted([EOS, *ascii_ids, *word_ids(known)]))


def word_ids(words: Iterable[str]) -> list[int]:
    return [prompts.FIRST_WORD_ID + prompts.WORDS.index(word) for word in words]


# ------------------------------------------------------------------------------ training data
class Language:
    """Random texts of the language as tensors."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        following = [
            prompts.continue_ids([word] * prompts.ORDER, 1)[0] for word in word_ids(prompts.WORDS)
        ]
        self._next_word = torch.tensor(following) - prompts.FIRST_WORD_ID

    def batch(self, count: int, length: int) -> Tensor:
        """[count, length] token ids."""
        line = torch.randint(len(prompts.WORDS), (count, prompts.ORDER), generator=self._random)
        lines = [line]
        while len(lines) * prompts.ORDER < length:
            lines.append(self._next_word[lines[-1]])
        return torch.cat(lines, 1)[:, :length] + prompts.FIRST_WORD_ID

    def confuse(self, ids: Tensor) -> Tensor:
        """`ids` with the words that the draft confuses replaced, mostly, by their successors."""
        confusing = torch.isin(ids, torch.tensor(word_ids(CONFUSED_BY_DRAFT)))
        confusing &= torch.rand(ids.shape, generator=self._random) < CONFUSION
        following = self._next_word[(ids - prompts.FIRST_WORD_ID)] + prompts.FIRST_WORD_ID
        return torch.where(confusing, following, ids)


def train(
    name: str, model: nn.Module, rate: float, steps: int, loss_at: Callable[[int], Tensor]
) -> None:
    """Minimise `loss_at(step)` over the model's parameters with a one-cycle learning rate."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    started = time.monotonic()
    for step in range(steps):
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            elapsed = time.monotonic() - started
            print(f"{name} step {step:4d} loss {loss.item():.4f} ({elapsed:.0f} s)", flush=True)


# ------------------------------------------------------------------------------------- target
def make_target(vocab_size: int, steps: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=NORM_EPS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    target = LlamaForCausalLM(config).float()
    language = Language(seed=1)

    def loss_at(step: int) -> Tensor:
        ids = language.batch(*text_shape(step, steps))
        logits = target(ids).logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, vocab_size), ids[:, 1:].reshape(-1))

    train("target", target, 3e-3, steps, loss_at)
    return round_to_bfloat16(target).eval().requires_grad_(False)


def text_shape(step: int, steps: int) -> tuple[int, int]:
    """(texts, tokens per text) of a training step: short ones, later every third a long one.

    Attention learnt on short texts alone loses its place among hundreds of other positions.
    """
    return (2, 1088) if step > 0.3 * steps and step % 3 == 0 else (24, 96)


def round_to_bfloat16(model: nn.Module) -> nn.Module:
    """Weights are shipped as bfloat16, at half the size; check what is shipped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


# -------------------------------------------------------------------------------------- draft
class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS) * self.weight


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [batch, length, heads, HEAD_DIM] at `positions` [length]."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Draft(nn.Module):
    """The layer of SGLang's ``LlamaForCausalLMEagle3``, for training; same parameter names."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        attention = nn.Module()
        attention.q_proj = linear(2 * HIDDEN, HEADS * HEAD_DIM)
        attention.k_proj = linear(2 * HIDDEN, KV_HEADS * HEAD_DIM)
        attention.v_proj = linear(2 * HIDDEN, KV_HEADS * HEAD_DIM)
        attention.o_proj = linear(HEADS * HEAD_DIM, HIDDEN)
        mlp = nn.Module()
        mlp.gate_proj, mlp.up_proj = linear(HIDDEN, INTERMEDIATE), linear(HIDDEN, INTERMEDIATE)
        mlp.down_proj = linear(INTERMEDIATE, HIDDEN)
        layer = nn.Module()
        layer.self_attn, layer.mlp = attention, mlp
        layer.hidden_norm, layer.input_layernorm = RMSNorm(), RMSNorm()
        layer.post_attention_layernorm = RMSNorm()
        self.fc = linear(HIDDEN * len(AUX_LAYERS), HIDDEN)
        self.midlayer, self.norm = layer, RMSNorm()
        self.lm_head = linear(HIDDEN, vocab_size)

    def step(
        self, embeddings: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """One speculative step from every position of a text at once.

        Row t holds the draft's state at position t: the token after t and a hidden state, the
        target's at the first step (`cache` is empty), the draft's own of row t-1's previous step
        later. At step k row t sees the first step's keys up to t-k and the k keys that its own
        chain has added since. Returns (hidden [batch, length, HIDDEN], logits) and appends the
        step's keys and values to `cache`.
        """
        batch, length, _ = hidden.shape
        layer, k = self.midlayer, len(cache)
        x = torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(hidden)), -1)
        rows = torch.arange(length)

        def heads(projection: nn.Linear) -> Tensor:
            return projection(x).view(batch, length, -1, HEAD_DIM)

        def shared(y: Tensor) -> Tensor:
            return y.repeat_interleave(HEADS // KV_HEADS, 2)

        query = rotate(heads(layer.self_attn.q_proj), rows)
        key = shared(rotate(heads(layer.self_attn.k_proj), rows))
        cache.append((key, shared(heads(layer.self_attn.v_proj))))
        first_keys, first_values = cache[0]
        scores = torch.einsum("blhd,bmhd->bhlm", query, first_keys)
        scores = [scores.masked_fill(rows[None, :] > rows[:, None] - k, float("-inf"))]
        # Row t's key of step m was computed by row t-k+m: shift it to row t.
        chain = [(c.roll(k - m, 1), v.roll(k - m, 1)) for m, (c, v) in enumerate(cache)][1:]
        scores += [(query * c).sum(-1).transpose(1, 2)[..., None] for c, _ in chain]
        weights = torch.softmax(torch.cat(scores, -1) * HEAD_DIM**-0.5, -1)
        mixed = torch.einsum("bhlm,bmhd->blhd", weights[..., :length], first_values)
        for place, (_, v) in enumerate(chain):
            mixed = mixed + weights[..., length + place].transpose(1, 2)[..., None] * v
        hidden = hidden + layer.self_attn.o_proj(mixed.reshape(batch, length, -1))
        y = layer.post_attention_layernorm(hidden)
        y = layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
        hidden = hidden + y
        return hidden, self.lm_head(self.norm(hidden))


def make_draft(target: LlamaForCausalLM, steps: int) -> Draft:
    token_ids = draft_token_ids()
    draft_id = torch.full((target.config.vocab_size,), IGNORED)
    draft_id[token_ids] = torch.arange(len(token_ids))
    draft = Draft(len(token_ids))
    language = Language(seed=2)

    def loss_at(step: int) -> Tensor:
        count, length = text_shape(step, steps)
        losses = [
            F.cross_entropy(logits.flatten(0, 1), draft_id[language.confuse(wanted)].flatten())
            for logits, wanted in unroll(draft, target, language.batch(count // 2, length))
        ]
        return torch.stack(losses).mean()

    train("draft", draft, 2e-3, steps, loss_at)
    return round_to_bfloat16(draft).eval().requires_grad_(False)


def unroll(draft: Draft, target: LlamaForCausalLM, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per speculative step: (logits [batch, rows, draft vocab], wanted target ids [batch, rows]).

    Only rows whose wanted token the language determines.
    """
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1] for layer in AUX_LAYERS], -1)
        embeddings = target.model.embed_tokens(ids[:, 1:])
    hidden, cache, steps = draft.fc(features[:, :-1]), [], []
    for k in range(UNROLL):
        hidden, logits = draft.step(embeddings, hidden, cache)
        first = prompts.ORDER - 2 + k
        steps.append((logits[:, first:-1], ids[:, first + 2 :]))
        hidden = hidden.roll(1, 1)
    return steps


# --------------------------------------------------------------------------------- self-check
@torch.no_grad()
def check(target: LlamaForCausalLM, draft: Draft) -> None:
    """Refuse a pair that has not learnt its language up to 1024 tokens."""
    ids = Language(seed=3).batch(4, 1024)
    logits = target(ids).logits[:, prompts.ORDER - 1 : -1]
    top = logits.topk(2, -1)
    margin = (top.values[..., 0] - top.values[..., 1]).min().item()
    right = (top.indices[..., 0] == ids[:, prompts.ORDER :]).float().mean().item()
    print(f"target: {right:.2%} of tokens right, smallest margin to the second choice {margin:.2f}")
    hits = [draft_hits(logits, wanted) for logits, wanted in unroll(draft, target, ids)]
    for k, (first, any_of_four) in enumerate(hits, start=1):
        print(f"draft step {k}: first choice right {first:.2%}, one of four {any_of_four:.2%}")
    if right < 1 or margin < 3:
        raise SystemExit("the target has not learnt the language: train it longer")
    if min(min(hits)) < 0.85 or min(any_of_four for _, any_of_four in hits) < 0.95:
        raise SystemExit("the draft has not learnt the language: train it longer")


def draft_hits(logits: Tensor, wanted: Tensor) -> tuple[float, float]:
    """How often the wanted token is the draft's first choice, and among its first four."""
    right = draft_token_ids()[logits.topk(4, -1).indices] == wanted[..., None]
    return right[..., 0].float().mean().item(), right.any(-1).float().mean().item()


# ------------------------------------------------------------------------------------- output
def save_target(target: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.bfloat16() for name, tensor in target.state_dict().items()}
    save_weights(tensors, folder)
    write_json(folder / "config.json", config_of("LlamaForCausalLM", target.config.vocab_size))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        },
    )


def save_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes private files


def save_draft(draft: Draft, vocab_size: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    token_ids = draft_token_ids()
    tensors = {name: tensor.bfloat16() for name, tensor in draft.state_dict().items()}
    tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    save_weights(tensors, folder)
    config = config_of("LlamaForCausalLMEagle3", vocab_size)
    config |= {
        "num_hidden_layers": 1,
        "draft_vocab_size": len(token_ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
            "use_aux_hidden_state": True,
        },
    }
    write_json(folder / "config.json", config)


def config_of(architecture: str, vocab_size: int) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent / "models"
    parser.add_argument("--output", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--target-steps", type=int, default=330)
    parser.add_argument("--draft-steps", type=int, default=210)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    target = make_target(vocab_size, arguments.target_steps)
    draft = make_draft(target, arguments.draft_steps)
    check(target, draft)
    save_target(target, tokenizer, arguments.output / "target")
    save_draft(draft, vocab_size, arguments.output / "draft")


if __name__ == "__main__":
    main()
