"""One base command line -> the command line and environment of each variant. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_spec_ext.args import ENV_NAMES, FLAGS, THRESHOLD_FLAG

SPECULATIVE_PREFIX = "--speculative-"
ALGORITHM = "--speculative-algorithm"
ADAPTIVE = "--speculative-adaptive"
ADAPTIVE_FLAGS = (ADAPTIVE, "--speculative-adaptive-config")

# SGLang prints one "Decode batch" line per 40 steps. A speculating request of 256 tokens lives for
# fewer than 100 steps, so 40 would leave one or two usable lines per wave of requests. And decoding
# gets slower as contexts grow, by 20 % over such a wave of 128 requests: lines that begin up to 20
# steps apart in two servers made equal ones differ by 2 %.
DECODE_LOG_INTERVAL = 5

# With speculation and no --max-running-requests, SGLang admits this many requests at once.
SPECULATIVE_ADMISSION_CAP = 48

_SECRET_FLAGS = ("--api-key", "--admin-api-key")


class VariantError(ValueError):
    """The variants or the base command line cannot be used; the message names the fix."""


@dataclass(frozen=True)
class Variant:
    """``off``, ``on``, ``adaptive``, or ``threshold`` with its N (requests)."""

    kind: str
    threshold: int | None = None

    @property
    def label(self) -> str:
        return self.kind if self.threshold is None else f"{self.kind}={self.threshold}"

    @property
    def speculates(self) -> bool:
        return self.kind != "off"


def parse_variants(text: str) -> list[Variant]:
    """``"off,on,threshold=16,adaptive"`` -> variants, in that order.

    Raises VariantError for an unknown, malformed or repeated variant.
    """
    variants: list[Variant] = []
    for word in (part.strip() for part in text.split(",")):
        if not word:
            continue
        variant = _parse_variant(word)
        if variant in variants:
            raise VariantError(f"variant {word!r} is given twice; name each once (--boots repeats)")
        variants.append(variant)
    if not variants:
        raise VariantError("no variant given; use for example --variants off,on")
    return variants


def _parse_variant(word: str) -> Variant:
    kind, has_value, value = word.partition("=")
    if kind == "threshold":
        if not (value.isascii() and value.isdigit()):
            raise VariantError(
                f"variant {word!r}: threshold needs a number of requests, e.g. threshold=16"
            )
        return Variant("threshold", int(value))
    if kind in ("off", "on", "adaptive") and not has_value:
        return Variant(kind)
    raise VariantError(f"unknown variant {word!r}; known: off, on, threshold=N, adaptive")


def check_base_command(argv: Sequence[str], variants: Sequence[Variant]) -> None:
    """Raises VariantError if variants cannot be derived from this base command line."""
    options = _option_names(argv)
    if "--config" in options:
        raise VariantError(
            "the base command reads arguments from --config FILE, which variants cannot rewrite; "
            "put the file's arguments on the command line"
        )
    if ALGORITHM not in options and any(variant.speculates for variant in variants):
        raise VariantError(
            f"the base command has no {ALGORITHM}, so only the variant `off` can run; "
            "add the speculative arguments (`off` strips them by itself)"
        )


def warnings_for(
    argv: Sequence[str], variants: Sequence[Variant], concurrency: Sequence[int]
) -> list[str]:
    """What will spoil the comparison, known before any server boots."""
    capped = max(concurrency) > SPECULATIVE_ADMISSION_CAP
    speculates = any(variant.speculates for variant in variants)
    if speculates and capped and "--max-running-requests" not in _option_names(argv):
        return [
            f"no --max-running-requests: with speculation SGLang admits "
            f"{SPECULATIVE_ADMISSION_CAP} requests at once, so levels above that would only "
            f"queue; add --max-running-requests {max(concurrency)} or more to the base command"
        ]
    return []


def command_for(variant: Variant, base: Sequence[str], port: int) -> list[str]:
    """The variant's command line, listening on 127.0.0.1:``port``.

    ``off`` strips every ``--speculative-*`` option; ``on`` strips our flags and the adaptive ones;
    ``threshold=N`` strips the adaptive ones and sets our threshold, keeping our other two flags;
    ``adaptive`` strips ours and switches SGLang's adaptive mode on.
    """
    argv = _without(base, ("--host", "--port"))
    if variant.kind == "off":
        argv = _without_prefix(argv, SPECULATIVE_PREFIX)
    elif variant.kind == "on":
        argv = _without(argv, (*FLAGS.values(), *ADAPTIVE_FLAGS))
    elif variant.kind == "threshold":
        argv = _without(argv, (THRESHOLD_FLAG, *ADAPTIVE_FLAGS))
        argv += [THRESHOLD_FLAG, str(variant.threshold)]
    else:
        argv = _without(argv, tuple(FLAGS.values()))
        if ADAPTIVE not in _option_names(argv):
            argv.append(ADAPTIVE)
    if "--decode-log-interval" not in _option_names(argv):
        argv += ["--decode-log-interval", str(DECODE_LOG_INTERVAL)]
    return [*argv, "--host", "127.0.0.1", "--port", str(port)]


def environment_for(variant: Variant, environ: Mapping[str, str]) -> dict[str, str]:
    """The server's environment, without thresholds that belong to other variants."""
    dropped = (ENV_NAMES["threshold"],) if variant.kind == "threshold" else ENV_NAMES.values()
    kept = {name: value for name, value in environ.items() if name not in dropped}
    # Log lines are read while the server runs: they must not wait in a buffer.
    return {**kept, "PYTHONUNBUFFERED": "1"}


def recorded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what SGLang does, without those that may hold a secret."""
    secret = ("KEY", "TOKEN", "SECRET", "PASSWORD")
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(("SGLANG_", "CUDA_VISIBLE_DEVICES"))
        and not any(word in name for word in secret)
    }


def option_value(argv: Sequence[str], name: str) -> str | None:
    """The value of the last ``--name VALUE`` or ``--name=VALUE``, as argparse would take it."""
    found = None
    for group in _groups(argv):
        head, has_value, value = group[0].partition("=")
        if head == name:
            found = value if has_value else (group[1] if len(group) > 1 else None)
    return found


def redacted(argv: Sequence[str]) -> list[str]:
    """``argv`` with the values of API keys replaced, fit to be written to a file."""
    shown: list[str] = []
    for group in _groups(argv):
        name, has_value, _ = group[0].partition("=")
        if name not in _SECRET_FLAGS:
            shown += group
        elif has_value:
            shown.append(f"{name}=***")
        else:
            shown += [name, *("***" for _ in group[1:])]
    return shown


def _groups(argv: Sequence[str]) -> list[list[str]]:
    """Each ``--option`` with the words after it; the words before the first form a group too."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _option_names(argv: Sequence[str]) -> set[str]:
    return {group[0].partition("=")[0] for group in _groups(argv)}


def _without(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    groups = _groups(argv)
    return [word for group in groups if group[0].partition("=")[0] not in names for word in group]


def _without_prefix(argv: Sequence[str], prefix: str) -> list[str]:
    return [word for group in _groups(argv) if not group[0].startswith(prefix) for word in group]
