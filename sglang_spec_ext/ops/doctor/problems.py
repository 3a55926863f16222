"""Known problems: how each is recognised, and what helps. Most were seen in public reports.

To add one: a row in PROBLEMS, and a case that shows it with a clean twin in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_spec_ext.args import FLAGS, KEYWORDS, THRESHOLD_FLAG
from sglang_spec_ext.compat import bootstrap, contracts, entry_point, workers
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity
from sglang_spec_ext.ops.doctor.facts import Facts
from sglang_spec_ext.ops.doctor.installed import PLUGIN
from sglang_spec_ext.ops.preflight import rules
from sglang_spec_ext.ops.preflight.flags import recorded
from sglang_spec_ext.ops.preflight.reading import OURS, Reading
from sglang_spec_ext.ops.preflight.setup import DEFAULT_CAP, OWN_CAP, Setup, local_config
from sglang_spec_ext.policy import Mode

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

ENOUGH_STEPS = 200  # before rates of a running server are judged
LOW_ACCEPT_LENGTH = 1.3  # tokens per verify; 1 is a draft that never helps
FLAPPING = 0.1  # switches per step


@dataclass(frozen=True)
class Problem:
    """``seen`` says in words what is wrong, or None where it is not; ``link`` is a report of it."""

    id: str
    severity: Severity
    seen: Callable[[Facts], str | None]
    fix: str
    link: str = ""


def _no_sglang(facts: Facts) -> str | None:
    here = facts.installed.version("sglang") or facts.server
    return None if here else "SGLang is not installed beside this interpreter"


def _other_version(facts: Facts) -> str | None:
    here = facts.installed.version("sglang")
    if facts.server is None or here in (None, facts.server.version):
        return None
    return f"the server runs SGLang {facts.server.version}, beside this interpreter is {here}"


def _gaps(facts: Facts) -> str | None:
    gaps = facts.installed.gaps
    if not gaps:
        return None
    more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
    return f"{THRESHOLD_FLAG} cannot take effect with this SGLang: {gaps[0]}{more}"


def _untested(facts: Facts) -> str | None:
    here = facts.installed.version("sglang")
    if here is None or facts.installed.gaps or here in contracts.TESTED_RELEASES:
        return None
    return (
        f"all that the plugin touches in SGLang {here} is as expected; its tests did not run on it"
    )


def _invisible(facts: Facts) -> str | None:
    here = facts.installed
    if here.loads_us or here.patched or not here.version("sglang"):
        return None
    if here.plugin_system:
        wanted = f"{entry_point.NAME} in {entry_point.GROUP}"
        return f"SGLang cannot see the plugin: no entry point {wanted}"
    if facts.environment.get(bootstrap.SWITCH) == "0":
        return None  # that is said by `_left_out`
    return "this SGLang has no plugin system, and our .pth, which loads the plugin, is not here"


def _left_out(facts: Facts) -> str | None:
    if facts.installed.patched:
        return None
    if not facts.installed.plugin_system:
        off = facts.environment.get(bootstrap.SWITCH) == "0"
        return f"{bootstrap.SWITCH}=0 keeps our .pth from loading the plugin" if off else None
    variable = entry_point.hidden_by(facts.environment)
    return f"{variable} keeps SGLang from loading the plugin" if variable else None


def _patched_partly(facts: Facts) -> str | None:
    seams = facts.installed.seams
    missing = [target for target, there in seams.items() if not there]
    if not missing or len(missing) == len(seams):
        return None
    return f"{len(missing)} of {len(seams)} places lack their patch, first: {missing[0]}"


def _changed_by_others(facts: Facts) -> str | None:
    others = [file.path for file in facts.installed.modified or () if not file.patch]
    if not others:
        return None
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"SGLang is not as its wheel had it, by no patch known here: {others[0]}{more}"


def _files_gone(facts: Facts) -> str | None:
    gone = facts.installed.gone
    return f"{len(gone)} files of SGLang are gone, first: {gone[0]}" if gone else None


def _cpu_torch(facts: Facts) -> str | None:
    torch = facts.installed.version("torch") or ""
    if not facts.installed.gpus or not torch.endswith("+cpu"):
        return None
    return f"torch {torch} is built without CUDA, and there is a GPU"


def _two_kernels(facts: Facts) -> str | None:
    names = [p.name for p in facts.installed.packages if p.name in ("sgl-kernel", "sglang-kernel")]
    return f"{' and '.join(names)} overwrite each other's files" if len(names) > 1 else None


def _kimi(facts: Facts) -> str | None:
    here = facts.installed
    modified = here.modified
    if here.version("sglang") != "0.5.9" or modified is None or here.loads_us or here.patched:
        return None  # the plugin gives that class the hooks
    if any(file.path.endswith("models/kimi_k25.py") for file in modified):
        return None
    return "Kimi-K2.5 with an EAGLE-3 draft dies with an AttributeError after loading its weights"


def _unbound(facts: Facts) -> str | None:
    for state in facts.server.ours if facts.server else []:
        if state.get("unbound"):
            return f"the running server has lost hooks: {', '.join(state['unbound'])}"
    return None


def _not_in_all(facts: Facts) -> str | None:
    if facts.server is None or not facts.state:
        return None
    missing = len(facts.server.states) - len(facts.server.ours)
    return (
        f"{missing} of {len(facts.server.states)} schedulers lack the plugin" if missing else None
    )


def _asked_in_vain(facts: Facts) -> str | None:
    name = "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD"
    if facts.server is None or facts.state or not facts.environment.get(name):
        return None
    return f"{name} is set here, but the running server does not have the plugin"


def _hidden_cap(facts: Facts) -> str | None:
    server = facts.server
    if server is None or facts.state or not facts.flag("speculative_algorithm"):
        return None
    dp = facts.flag("dp_size", 1)
    if server.cap is None or server.cap * dp not in (DEFAULT_CAP, *OWN_CAP.values()):
        return None
    each = f", {server.cap} on each of {dp} DP workers" if dp > 1 else ""
    return (
        f"at most {server.cap * dp} requests run at once{each}: what SGLang sets under speculation "
        "when nobody chooses; more than that queue"
    )


def _low_accept_length(facts: Facts) -> str | None:
    state = facts.state
    if state:
        steps = state.get("steps", {}).get(Mode.SPECULATING.value, 0)
        length = state.get("accept_length")
    else:
        length, steps = (facts.server.accept_length if facts.server else None), ENOUGH_STEPS
    if length is None or length >= LOW_ACCEPT_LENGTH or steps < ENOUGH_STEPS:
        return None
    return f"accept length is {length:.2f}: the draft costs more than it brings"


def _flapping(facts: Facts) -> str | None:
    state = facts.state
    if not state:
        return None
    steps, switches = (sum(state.get(what, {}).values()) for what in ("steps", "switches"))
    if steps < ENOUGH_STEPS or switches < FLAPPING * steps:
        return None
    return f"the mode has changed {switches} times in {steps} steps"


def _own_extend(facts: Facts) -> str | None:
    warmth = str((facts.state or {}).get("draft_kept_warm_by", ""))
    if not warmth.startswith("SGLang's"):
        return None
    return f"the draft is kept warm by {warmth}: right, but slower than KV-only writes"


def _tokenizer_workers(facts: Facts) -> str | None:
    if not facts.state or facts.flag("tokenizer_worker_num", 1) <= 1:
        return None
    return "with several tokenizer workers a request's accept length counts target-only tokens too"


def _no_metrics(facts: Facts) -> str | None:
    if not facts.state or facts.flag("enable_metrics", False):
        return None
    return "/metrics is off, and with it the plugin's series"


PROBLEMS = (
    Problem("no-sglang", ERROR, _no_sglang, "run this with the interpreter that serves"),
    Problem("files-gone", ERROR, _files_gone, "pip install --force-reinstall --no-deps sglang"),
    Problem(
        "contract",
        WARNING,  # no harm to those who do not use the flag; with it the server says so and stops
        _gaps,
        f"use SGLang {workers.supported()}; see tools/verify_imports.py",
    ),
    Problem("plugin-invisible", WARNING, _invisible, f"pip install {PLUGIN} in this environment"),
    Problem(
        "plugin-left-out",
        ERROR,
        _left_out,
        f"unset the variable; SGLANG_PLUGINS may also name {entry_point.NAME}",
    ),
    Problem(
        "patched-partly", WARNING, _patched_partly, "tools/apply_patches.py status, then apply"
    ),
    Problem("hooks-lost", ERROR, _unbound, "another plugin replaced them: leave it out, restart"),
    Problem(
        "plugin-partly", ERROR, _not_in_all, "start all nodes and replicas from one environment"
    ),
    Problem(
        "asked-in-vain",
        ERROR,
        _asked_in_vain,
        "restart the server with the variable set, or with the flag",
        "https://github.com/vllm-project/vllm/pull/35060",
    ),
    Problem("two-kernels", ERROR, _two_kernels, "uninstall both, reinstall the one SGLang names"),
    Problem("torch-without-cuda", ERROR, _cpu_torch, "reinstall the torch that SGLang pins"),
    Problem(
        "changed-by-others",
        WARNING,
        _changed_by_others,
        "say so in a bug report, or reinstall: pip install --force-reinstall --no-deps sglang",
        "https://github.com/redai-studio/Relax/issues/191",
    ),
    Problem(
        "hidden-cap",
        WARNING,
        _hidden_cap,
        f"--max-running-requests, or {THRESHOLD_FLAG}, which lifts it",
        "https://github.com/sgl-project/sglang/pull/34290",
    ),
    Problem(
        "low-accept-length",
        WARNING,
        _low_accept_length,
        "sglang-spec-ext check-draft TARGET DRAFT; if it finds nothing, a draft for this target",
        "https://github.com/vllm-project/vllm/pull/18909",
    ),
    Problem(
        "flapping",
        WARNING,
        _flapping,
        f"{FLAGS['resume_threshold']} below {FLAGS['threshold']}, or a larger "
        f"{FLAGS['min_steps']}; the first two also through /set_internal_state",
        "https://github.com/vllm-project/vllm/issues/49548",
    ),
    Problem("other-version", WARNING, _other_version, "run this where the server runs"),
    Problem("untested", NOTE, _untested, ""),
    Problem(
        "kimi-hook",
        NOTE,
        _kimi,
        f"pip install {PLUGIN}, or tools/apply_patches.py apply --only kimi_k25",
        "https://github.com/sgl-project/sglang/pull/19689",
    ),
    Problem("own-extend", NOTE, _own_extend, ""),
    Problem("tokenizer-workers", NOTE, _tokenizer_workers, ""),
    Problem("no-metrics", NOTE, _no_metrics, "--enable-metrics"),
)

# Of preflight's rules, those that hold for resolved arguments, too.
_RESOLVED = (
    rules.tree_drafts,
    rules.mixed_chunk,
    rules.adaptive,
    rules.draft_backend,
    rules.capacity,
)


def find(facts: Facts) -> list[Finding]:
    """Everything that applies, the worst first."""
    found = []
    for problem in PROBLEMS:
        seen = problem.seen(facts)
        if seen is not None:
            fix = "; ".join(filter(None, [problem.fix, problem.link and f"see {problem.link}"]))
            found.append(Finding(problem.id, problem.severity, seen, fix))
    found += _of_preflight(facts)
    return sorted(found, key=lambda finding: finding.severity)


def _of_preflight(facts: Facts) -> Iterator[Finding]:
    """What preflight would have said about this environment, and about the server's arguments."""
    if facts.release is None:
        return
    reading = Reading(recorded(facts.release).with_flags(OURS))
    chosen: tuple[rules.Rule, ...] = (rules.environment,)
    if facts.server is not None:
        reading.values |= {
            name: value for name, value in facts.server.flags.items() if name in _dests(reading)
        }
        if facts.server.cap is not None:
            reading.values["max_running_requests"] = facts.server.cap * facts.flag("dp_size", 1)
        for field, keyword in KEYWORDS.items():
            if facts.state and field in facts.state:
                reading.values[keyword] = facts.state[field]
        chosen += _RESOLVED
    setup = Setup(
        release=facts.release,
        reading=reading,
        environment=facts.environment,
        target=local_config(facts.flag("model_path")),
        draft=local_config(facts.flag("speculative_draft_model_path")),
    )
    for rule in chosen:
        yield from rule(setup)


def _dests(reading: Reading) -> set[str]:
    return set(reading.table.by_dest)
