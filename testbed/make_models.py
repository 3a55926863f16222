"""Train and write the tiny target and its drafts: ``target``, ``draft``, ``draft_eagle1``.

    python testbed/make_models.py [--output FOLDER] [--only-eagle1]

``draft`` is an EAGLE-3 head. ``draft_eagle1``, for ``--speculative-algorithm EAGLE``, is trained
last, so that it alone can be made anew on a target that is already in FOLDER.

Needs torch, transformers, tokenizers and safetensors (an environment with SGLang has them) and
two and a half minutes on two cores. Same seed, same machine: same weights. All models learn the
language of `prompts.py`; a self-check refuses to write any that has not learned it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from abc import ABC, abstractmethod
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


def load_target(folder: Path) -> LlamaForCausalLM:
    """The target that `save_target` wrote; its weights are those that `make_target` returned."""
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return target.eval().requires_grad_(False)


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


def llama_layer(inputs: int, *norms: str) -> nn.Module:
    """A Llama layer whose attention reads `inputs` features; same parameter names as SGLang's."""
    attention = nn.Module()
    attention.q_proj = linear(inputs, HEADS * HEAD_DIM)
    attention.k_proj = linear(inputs, KV_HEADS * HEAD_DIM)
    attention.v_proj = linear(inputs, KV_HEADS * HEAD_DIM)
    attention.o_proj = linear(HEADS * HEAD_DIM, HIDDEN)
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj = linear(HIDDEN, INTERMEDIATE), linear(HIDDEN, INTERMEDIATE)
    mlp.down_proj = linear(INTERMEDIATE, HIDDEN)
    layer = nn.Module()
    layer.self_attn, layer.mlp = attention, mlp
    for norm in norms:
        setattr(layer, norm, RMSNorm())
    return layer


class Draft(nn.Module, ABC):
    """What the drafts share: one Llama layer, unrolled over speculative steps for training.

    name: of its folder.
    architecture: SGLang's class for it.
    token_ids: [draft vocab], the target ids that it can propose.
    layer: see `llama_layer`.
    """

    name: str
    architecture: str
    token_ids: Tensor
    layer: nn.Module

    @abstractmethod
    def first_hidden(self, states: tuple[Tensor, ...]) -> Tensor:
        """The hidden state of the first step, [batch, length, HIDDEN].

        states: the target's embeddings and the output of each of its layers, that of the last one
        after the final norm; each [batch, length, HIDDEN].
        """

    @abstractmethod
    def attention_input(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(residual [batch, length, HIDDEN], what attention reads [batch, length, ...])."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[batch, length, draft vocab]."""

    def step(
        self, embeddings: Tensor, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """One speculative step from every position of a text at once.

        Row t holds the draft's state at position t: the token after t and a hidden state, the
        target's at the first step (`cache` is empty), the draft's own of row t-1's previous step
        later. At step k row t sees the first step's keys up to t-k and the k keys that its own
        chain has added since. Returns hidden [batch, length, HIDDEN] and appends the step's keys
        and values to `cache`.
        """
        batch, length, _ = hidden.shape
        layer, k = self.layer, len(cache)
        residual, x = self.attention_input(embeddings, hidden)
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
        hidden = residual + layer.self_attn.o_proj(mixed.reshape(batch, length, -1))
        y = layer.post_attention_layernorm(hidden)
        y = layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
        return hidden + y


class Eagle3Draft(Draft):
    """EAGLE-3: features of several target layers, a vocabulary and an LM head of its own."""

    name, architecture = "draft", "LlamaForCausalLMEagle3"

    def __init__(self) -> None:
        super().__init__()
        self.token_ids = draft_token_ids()
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        layer = llama_layer(2 * HIDDEN, *norms)
        self.fc = linear(HIDDEN * len(AUX_LAYERS), HIDDEN)
        self.midlayer, self.norm = layer, RMSNorm()
        self.lm_head = linear(HIDDEN, len(self.token_ids))

    @property
    def layer(self) -> nn.Module:
        return self.midlayer

    def first_hidden(self, states: tuple[Tensor, ...]) -> Tensor:
        return self.fc(torch.cat([states[layer + 1] for layer in AUX_LAYERS], -1))

    def attention_input(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(hidden)), -1)
        return hidden, x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


class Eagle1Draft(Draft):
    """EAGLE-1: the target's final hidden state in, straight to the target's LM head out."""

    name, architecture = "draft_eagle1", "LlamaForCausalLMEagle"

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.token_ids = torch.arange(target.config.vocab_size)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([llama_layer(HIDDEN, "post_attention_layernorm")])
        # a plain tensor: neither trained nor written, the server takes the target's
        self.target_lm_head = target.lm_head.weight.detach()

    @property
    def layer(self) -> nn.Module:
        return self.layers[0]

    def first_hidden(self, states: tuple[Tensor, ...]) -> Tensor:
        return states[-1]

    def attention_input(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((embeddings, hidden), -1))
        return x, x

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.target_lm_head)


def train_draft(draft: Draft, target: LlamaForCausalLM, steps: int) -> None:
    draft_id = torch.full((target.config.vocab_size,), IGNORED)
    draft_id[draft.token_ids] = torch.arange(len(draft.token_ids))
    language = Language(seed=2)

    def loss_at(step: int) -> Tensor:
        count, length = text_shape(step, steps)
        losses = [
            F.cross_entropy(logits.flatten(0, 1), draft_id[language.confuse(wanted)].flatten())
            for logits, wanted in unroll(draft, target, language.batch(count // 2, length))
        ]
        return torch.stack(losses).mean()

    train(draft.name, draft, 2e-3, steps, loss_at)
    round_to_bfloat16(draft).eval().requires_grad_(False)


def unroll(draft: Draft, target: LlamaForCausalLM, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per speculative step: (logits [batch, rows, draft vocab], wanted target ids [batch, rows]).

    Only rows whose wanted token the language determines.
    """
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
        embeddings = target.model.embed_tokens(ids[:, 1:])
    hidden, cache, steps = draft.first_hidden(tuple(s[:, :-1] for s in states)), [], []
    for k in range(UNROLL):
        hidden = draft.step(embeddings, hidden, cache)
        first = prompts.ORDER - 2 + k
        steps.append((draft.logits(hidden)[:, first:-1], ids[:, first + 2 :]))
        hidden = hidden.roll(1, 1)
    return steps


# --------------------------------------------------------------------------------- self-check
@torch.no_grad()
def check(target: LlamaForCausalLM, drafts: Iterable[Draft]) -> None:
    """Refuse models that have not learnt the language up to 1024 tokens."""
    ids = Language(seed=3).batch(4, 1024)
    logits = target(ids).logits[:, prompts.ORDER - 1 : -1]
    top = logits.topk(2, -1)
    margin = (top.values[..., 0] - top.values[..., 1]).min().item()
    right = (top.indices[..., 0] == ids[:, prompts.ORDER :]).float().mean().item()
    print(f"target: {right:.2%} of tokens right, smallest margin to the second choice {margin:.2f}")
    if right < 1 or margin < 3:
        raise SystemExit("the target has not learnt the language: train it longer")
    for draft in drafts:
        steps = unroll(draft, target, ids)
        hits = [draft_hits(draft.token_ids, logits, wanted) for logits, wanted in steps]
        for k, (first, any_of_four) in enumerate(hits, start=1):
            shares = f"first choice right {first:.2%}, one of four {any_of_four:.2%}"
            print(f"{draft.name} step {k}: {shares}")
        if min(min(hits)) < 0.85 or min(any_of_four for _, any_of_four in hits) < 0.95:
            raise SystemExit(f"{draft.name} has not learnt the language: train it longer")


def draft_hits(token_ids: Tensor, logits: Tensor, wanted: Tensor) -> tuple[float, float]:
    """How often the wanted token is the draft's first choice, and among its first four."""
    right = token_ids[logits.topk(4, -1).indices] == wanted[..., None]
    return right[..., 0].float().mean().item(), right.any(-1).float().mean().item()


# ------------------------------------------------------------------------------------- output
def save_target(target: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    config = config_of("LlamaForCausalLM", target.config.vocab_size)
    save(weights_of(target), config, folder)
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


def save_draft(draft: Draft, vocab_size: int, folder: Path) -> None:
    tensors = weights_of(draft)
    config = config_of(draft.architecture, vocab_size) | {"num_hidden_layers": 1}
    if isinstance(draft, Eagle3Draft):
        token_ids = draft.token_ids
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
        config |= {
            "draft_vocab_size": len(token_ids),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
                "use_aux_hidden_state": True,
            },
        }
    save(tensors, config, folder)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}


def save(tensors: dict[str, Tensor], config: dict[str, object], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes private files
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
    parser.add_argument("--eagle1-steps", type=int, default=210)
    parser.add_argument("--threads", type=int, default=2)
    only = "train draft_eagle1 alone, on the target that is in the output folder"
    parser.add_argument("--only-eagle1", action="store_true", help=only)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    drafts: list[Draft] = []
    if arguments.only_eagle1:
        target = load_target(arguments.output / "target")
    else:
        tokenizer = build_tokenizer()
        target = make_target(tokenizer.get_vocab_size(), arguments.target_steps)
        drafts.append(Eagle3Draft())
        train_draft(drafts[-1], target, arguments.draft_steps)
    torch.manual_seed(0)  # the same head whether or not the others were trained before it
    drafts.append(Eagle1Draft(target))
    train_draft(drafts[-1], target, arguments.eagle1_steps)
    check(target, drafts)
    if not arguments.only_eagle1:
        save_target(target, tokenizer, arguments.output / "target")
    for draft in drafts:
        save_draft(draft, target.config.vocab_size, arguments.output / draft.name)


if __name__ == "__main__":
    main()
