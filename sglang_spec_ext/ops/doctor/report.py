"""The page, for people and for programs. Nothing secret is on it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_spec_ext import __version__
from sglang_spec_ext.ops.check_draft.finding import Finding, exit_code
from sglang_spec_ext.ops.doctor.facts import Facts
from sglang_spec_ext.ops.doctor.server import Server
from sglang_spec_ext.ops.findings import as_json as findings_as_json
from sglang_spec_ext.ops.findings import print_findings
from sglang_spec_ext.ops.wait.masking import SECRET_NAME, mask

_VARIABLES = re.compile(r"(SGLANG_|SGL_|NCCL_|CUDA_|HIP_|TORCH|FLASHINFER_|HF_HUB_OFFLINE)")
LABEL = 18  # columns


Line = tuple[str, str]
"""What it is about, and what there is to say."""


def environment_lines(facts: Facts) -> Iterator[Line]:
    installed = facts.installed
    yield "system", installed.system
    yield "python", installed.python
    for package in installed.packages:
        yield package.name, f"{package.version}, {package.origin}"
    if installed.version("sglang"):
        yield "sglang files", _files(facts)
        if installed.plugin_system:
            loaded = "visible to SGLang" if installed.loads_us else "not visible to SGLang"
        else:
            loaded = "loaded by its .pth" if installed.loads_us else "its .pth is not in effect"
        seams = sum(installed.seams.values())
        if seams:
            loaded += f", called by patches in {seams} of {len(installed.seams)} places"
        fits = "contract holds" if not installed.gaps else f"{len(installed.gaps)} gaps in contract"
        yield "plugin", f"{loaded}, {fits}"
    for gpu in installed.gpus or ("no GPU that nvidia-smi knows",):
        yield "gpu", gpu
    for name, value in variables(facts.environment).items():
        yield "variable", f"{name}={value}"


def server_lines(server: Server) -> Iterator[Line]:
    flags = server.flags
    yield "server", f"{server.url}, SGLang {server.version}"
    yield "model", str(server.info.get("model_path"))
    yield "arguments", " ".join(f"{name}={_short(value)}" for name, value in flags.items())
    if server.cap is not None:
        yield "running cap", f"{server.cap} requests per scheduler"
    if server.accept_length is not None:
        yield "accept length", f"{server.accept_length:.2f} (SGLang's own average)"
    ranks = int(server.info.get("tp_size") or 1)
    for number, state in enumerate(server.ours):
        which = f" {number}" if len(server.states) > 1 else ""
        bound = "hooks bound" if not state.get("unbound") else f"UNBOUND {state['unbound']}"
        everywhere = f" by all {ranks} ranks" if ranks > 1 else ""
        confirmed = f", confirmed at start{everywhere}" if server.launched_by_us else ""
        yield f"scheduler{which}", f"plugin {state.get('version')}, {bound}{confirmed}"
        yield from _state_lines(state)
    if not server.ours:
        yield "plugin", "not bound in this server: its flag was not given, or it was not loaded"


def _state_lines(state: Mapping[str, Any]) -> Iterator[Line]:
    if state.get("version") != __version__:
        yield "state", json.dumps(state)  # of another version of the plugin: as it came
        return
    largest = state["largest_threshold"]
    yield "mode", f"{state['mode']} for {state['steps_in_mode']} decode steps"
    yield (
        "threshold",
        f"N={state['threshold']}, M={state['resume_threshold']}, K={state['min_steps']}"
        + (f"; N can be raised to {largest}" if largest is not None else ""),
    )
    switches = state["switches"]
    yield (
        "switches",
        f"{switches['target-only']} to target-only, {switches['speculating']} back "
        f"({state['resumes']} resumes)",
    )
    for what in ("steps", "tokens"):
        counted = state[what]
        yield what, ", ".join(f"{number} {mode}" for mode, number in counted.items())
    length = state["accept_length"]
    yield "accept length", "no verify yet" if length is None else f"{length:.2f} over all verifies"
    yield "draft", f"kept warm by {state['draft_kept_warm_by']}"
    yield "draft rows", f"{state['draft_tokens_warmed']} written while target-only"
    if state.get("refused"):
        yield "refused", f"by the last /set_internal_state: {state['refused']}"


def print_page(console: Console, facts: Facts, findings: list[Finding]) -> None:
    for label, words in environment_lines(facts):
        _print(console, label, words)
    if facts.server is not None:
        console.print()
        for label, words in server_lines(facts.server):
            _print(console, label, words)
    console.print()
    print_findings(console, findings, with_ids=True)


def as_json(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    installed = facts.installed
    page: dict[str, Any] = {
        "exit_code": exit_code(findings),
        "environment": {**asdict(installed), "variables": variables(facts.environment)},
        "server": None,
        "findings": findings_as_json(findings),
    }
    if facts.server is not None:
        server = facts.server
        page["server"] = {
            "url": server.url,
            "version": server.version,
            "model": server.info.get("model_path"),
            "arguments": server.flags,
            "running_cap": server.cap,
            "accept_length": server.accept_length,
            "launcher_confirmed": server.launched_by_us,
            "schedulers": len(server.states),
            "plugin": server.ours,
        }
    masked: dict[str, Any] = _masked(page)
    return masked


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that SGLang and its libraries read, the values of secret ones masked."""
    return {
        name: "***" if SECRET_NAME.search(name) else value
        for name, value in sorted(environment.items())
        if _VARIABLES.match(name)
    }


def _files(facts: Facts) -> str:
    modified = facts.installed.modified
    if modified is None:
        return "cannot be compared: not installed from a wheel"
    if not modified:
        return "as in the wheel"
    by_patch: dict[str, int] = {}
    for file in modified:
        by_patch[file.patch or "unknown"] = by_patch.get(file.patch or "unknown", 0) + 1
    return "changed: " + ", ".join(f"{count} by {name}" for name, count in by_patch.items())


def _short(value: Any) -> str:
    text = str(value).replace(" ", "")
    return text if len(text) <= 60 else f"{text[:57]}..."


def _print(console: Console, label: str, words: str) -> None:
    indent = f"{label:<{LABEL}}"
    text = Text(indent if len(indent) == LABEL else f"{label} ", "dim")
    text.append(mask(words), "default")
    console.print(text, soft_wrap=not console.is_terminal)


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {key: _masked(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(each) for each in value]
    return value
