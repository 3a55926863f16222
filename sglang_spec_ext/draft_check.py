"""`check-draft` at boot: what would make every drafted token wrong, said before weights load.

Reads config.json and the headers of weight files, so it costs a fraction of a second; needs no
torch. What it cannot read it leaves to SGLang, with a note in the log.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from sglang_spec_ext.args import CHECK_FLAG, SettingsError, wants_hooks
from sglang_spec_ext.compat import releases
from sglang_spec_ext.ops.check_draft import CheckpointError, ServerOptions, Severity, check
from sglang_spec_ext.ops.check_draft.checkpoint import located
from sglang_spec_ext.ops.check_draft.finding import Finding
from sglang_spec_ext.ops.check_draft.server import longer_context_allowed

logger = logging.getLogger("sglang_spec_ext")

# Algorithms whose drafts `check-draft` knows; NEXTN is SGLang's other name for EAGLE.
CHECKED = ("EAGLE", "EAGLE3", "NEXTN")

# ServerOptions field: name of the server argument, where the two differ.
_NAMES = {
    "algorithm": "speculative_algorithm",
    "draft_attention_backend": "speculative_draft_attention_backend",
    "draft_quantization": "speculative_draft_model_quantization",
    "token_map": "speculative_token_map",
    "target": "model_path",
    "draft": "speculative_draft_model_path",
}
_SAME = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend",
    "context_length", "disable_cuda_graph", "dtype", "quantization",
)  # fmt: skip


def run(arguments: Any, mode: str) -> list[Finding]:
    """Check the draft of a server that is about to start, and log what is wrong with it.

    Args:
        arguments: a view of the resolved server arguments.
        mode: one of ``args.CHECK_MODES``.

    Returns:
        The findings worse than a note; empty where nothing was checked.

    Raises:
        SettingsError: there are errors and the mode is ``stop``.
    """
    options = options_of(arguments)
    if mode == "off" or options.draft is None or str(options.algorithm).upper() not in CHECKED:
        return []
    draft = located(Path(options.draft))
    target = located(Path(options.target)) if options.target else None
    if not draft.is_dir():
        logger.warning(
            "spec-ext: the draft %s is not on this machine yet, so it is not checked before it "
            "loads; `sglang-spec-ext check-draft` does it later",
            draft,
        )
        return []
    if target is not None and not target.is_dir():
        target = None
    try:
        findings = check(target, draft, options)
    except (CheckpointError, ValueError, OSError) as problem:
        logger.warning("spec-ext: the draft is not checked before it loads: %s", problem)
        return []
    worse = [finding for finding in findings if finding.severity < Severity.NOTE]
    errors = [finding for finding in worse if finding.severity is Severity.ERROR]
    if errors and mode == "stop":
        raise SettingsError(_explain(errors, options))
    for finding in worse:
        logger.warning("spec-ext: draft %s: %s", finding.severity.word, _line(finding))
    return worse


def options_of(arguments: Any) -> ServerOptions:
    """The server's arguments in the words of `check-draft`."""
    names = {**_NAMES, **{name: name for name in _SAME}}
    values = {field: getattr(arguments, name, None) for field, name in names.items()}
    values["allow_longer_context"] = longer_context_allowed(os.environ)
    values["plugin"] = wants_hooks(values["algorithm"])
    version = releases.installed_version()
    try:
        releases.nearest(version or "")
    except ValueError:
        version = None  # a build without a usual version: judge for all releases
    return ServerOptions().updated(release=version, **values)


def _explain(errors: list[Finding], options: ServerOptions) -> str:
    lines = "".join(f"\n  - {_line(finding)}" for finding in errors)
    return (
        f"the draft {options.draft} would not draft as it was trained to:{lines}\n"
        f"More: sglang-spec-ext check-draft --target {options.target} --draft {options.draft}. "
        f"{CHECK_FLAG} warn starts the server all the same."
    )


def _line(finding: Finding) -> str:
    return f"{finding.id}: {finding.message}" + (f" -> {finding.fix}" if finding.fix else "")
