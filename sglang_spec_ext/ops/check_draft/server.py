"""The arguments of the SGLang server that decide whether a draft fits."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

ALLOW_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


@dataclass(frozen=True)
class ServerOptions:
    """What is known about the server; None where nothing is.

    ``release`` is the SGLang version to judge for, None for all that are known.
    ``context_length`` is in tokens. ``plugin``: the server has this package's EAGLE-3 hooks. The
    others are the values of SGLang's flags of that name.
    """

    release: str | None = None
    algorithm: str | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    draft_attention_backend: str | None = None
    context_length: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    token_map: str | None = None
    target: str | None = None
    draft: str | None = None
    allow_longer_context: bool = False
    disable_cuda_graph: bool = False
    plugin: bool = False

    def updated(self, **given: object) -> ServerOptions:
        """The same with every value that is not None in ``given`` put over it."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return ServerOptions(**{**own, **{k: v for k, v in given.items() if v is not None}})


# SGLang's spellings of the flags that matter here.
_FLAGS = {
    "target": ("--model-path", "--model"),
    "draft": ("--speculative-draft-model-path", "--speculative-draft-model"),
    "algorithm": ("--speculative-algorithm",),
    "attention_backend": ("--attention-backend",),
    "prefill_attention_backend": ("--prefill-attention-backend",),
    "decode_attention_backend": ("--decode-attention-backend",),
    "draft_attention_backend": ("--speculative-draft-attention-backend",),
    "context_length": ("--context-length",),
    "dtype": ("--dtype",),
    "quantization": ("--quantization",),
    "draft_quantization": ("--speculative-draft-model-quantization",),
    "token_map": ("--speculative-token-map",),
}


_TRUTH = {"true": True, "1": True, "yes": True, "y": True,
          "false": False, "0": False, "no": False, "n": False}  # fmt: skip


def truth(value: str) -> bool | None:
    """What SGLang takes the value of an environment variable for; None for neither."""
    return _TRUTH.get(value.lower())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"the server's command line: {message}")


def parse_command_line(words: Sequence[str], environ: Mapping[str, str]) -> ServerOptions:
    """Read what matters out of an SGLang command line; unknown words are left alone.

    Raises ValueError when a flag that matters has no value or a wrong one.
    """
    parser = _Parser(add_help=False)
    for name, spellings in _FLAGS.items():
        kind = int if name == "context_length" else str
        parser.add_argument(*spellings, dest=name, type=kind)
    parser.add_argument("--disable-cuda-graph", action="store_true")
    known, _ = parser.parse_known_args(list(words))
    given = [word.partition("=")[::2] for word in words]  # `ENV=1 python -m sglang.launch_server`
    values = {name: getattr(known, name) for name in _FLAGS}
    allowed = longer_context_allowed({**environ, **dict(given)})
    return ServerOptions(
        **values, allow_longer_context=allowed, disable_cuda_graph=known.disable_cuda_graph
    )


def longer_context_allowed(environ: Mapping[str, str]) -> bool:
    """Whether SGLang lets a context be longer than the model's config.json says."""
    return truth(environ.get(ALLOW_LONGER_CONTEXT, "")) is True
