"""The table of all rules, and `check`, which runs them."""

from __future__ import annotations

from pathlib import Path

from sglang_spec_ext.compat.releases import RELEASES, nearest
from sglang_spec_ext.ops.check_draft import (
    rules_architecture,
    rules_layout,
    rules_serving,
    rules_states,
    rules_vocabulary,
)
from sglang_spec_ext.ops.check_draft.checkpoint import Checkpoint, read_checkpoint, read_config
from sglang_spec_ext.ops.check_draft.config import ModelConfig
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity
from sglang_spec_ext.ops.check_draft.pair import Pair, Rule
from sglang_spec_ext.ops.check_draft.server import ServerOptions

RULES: tuple[Rule, ...] = (
    *rules_architecture.RULES,
    *rules_layout.RULES,
    *rules_states.RULES,
    *rules_vocabulary.RULES,
    *rules_serving.RULES,
)

# Findings about the check itself.
NO_TARGET = "no-target"
RELEASE_UNKNOWN = "release-unknown"


def check(target: Path | None, draft: Path, args: ServerOptions | None = None) -> list[Finding]:
    """What is wrong with ``draft`` for ``target`` under the server's arguments, worst first.

    Reads config.json, headers, d2t and t2d only. Without a target the rules that need it are left
    out, and a note says so. Raises CheckpointError when a checkpoint cannot be read, ValueError
    for a release older than all known ones.
    """
    known = ModelConfig(read_config(target), target) if target is not None else None
    return check_read(known, read_checkpoint(draft), args or ServerOptions())


def check_read(target: ModelConfig | None, draft: Checkpoint, args: ServerOptions) -> list[Finding]:
    """`check` for what has been read already (or not been written yet)."""
    pair = Pair(draft, target, args)
    releases, notes = _releases(args.release)
    left_out = []
    findings = []
    for rule in RULES:
        if rule.needs_target and target is None:
            left_out.append(rule.id)
            continue
        for hit in rule.test(pair):
            if set(hit.releases) & set(releases):
                findings.append(
                    Finding(
                        rule.id,
                        rule.severity,
                        hit.message,
                        hit.fix,
                        hit.fix_by,
                        hit.releases,
                        hit.edits,
                    )
                )
    if left_out:
        notes.append(
            Finding(
                NO_TARGET,
                Severity.NOTE,
                f"no target given, so not checked: {', '.join(left_out)}",
                "give --target",
            )
        )
    return sorted(findings + notes, key=lambda finding: finding.severity)


def _releases(version: str | None) -> tuple[tuple[str, ...], list[Finding]]:
    if version is None:
        return RELEASES, []
    release, read = nearest(version)
    if read:
        return (release,), []
    note = Finding(
        RELEASE_UNKNOWN,
        Severity.NOTE,
        f"this tool does not know SGLang {version}; judged as {release}",
    )
    return (release,), [note]
