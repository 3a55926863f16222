"""Rules about combinations of arguments, each read from the sources of the releases it names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from sglang_spec_ext import refusals
from sglang_spec_ext.args import (
    CHECK_KEYWORD,
    THRESHOLD_FLAG,
    SettingsError,
    draft_check,
    wants_hooks,
)
from sglang_spec_ext.compat import workers
from sglang_spec_ext.compat.releases import before, describe
from sglang_spec_ext.ops.check_draft.finding import Finding, Severity
from sglang_spec_ext.ops.preflight.flags import releases_with_variable, variables
from sglang_spec_ext.ops.preflight.setup import DEFAULT_CAP, EAGLE_FAMILY, Setup

Rule = Callable[[Setup], Iterator[Finding]]
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

THREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
ALGORITHMS = {  # and the first release that has them
    "EAGLE": "0.5.9",
    "EAGLE3": "0.5.9",
    "STANDALONE": "0.5.9",
    "NGRAM": "0.5.9",
    "DFLASH": "0.5.11",
    "FROZEN_KV_MTP": "0.5.12.post1",
    "DSPARK": "0.5.16",
    "UNO": "0.5.20",
}
# Targets whose checkpoint brings its own draft layers, and the first release that knows it.
BUILT_IN_DRAFT = {
    "DeepseekV3ForCausalLM": "0.5.9",
    "DeepseekV32ForCausalLM": "0.5.9",
    "Glm4MoeForCausalLM": "0.5.9",
    "Glm4MoeLiteForCausalLM": "0.5.9",
    "GlmMoeDsaForCausalLM": "0.5.9",
    "BailingMoeForCausalLM": "0.5.9",
    "BailingMoeV2ForCausalLM": "0.5.9",
    "BailingMoeV2_5ForCausalLM": "0.5.9",
    "MistralLarge3ForCausalLM": "0.5.9",
    "PixtralForConditionalGeneration": "0.5.9",
    "DeepseekV4ForCausalLM": "0.5.12.post1",
    "HYV3ForCausalLM": "0.5.11",
    "HYV4ForCausalLM": "0.5.20",
    "Qwen4ExpForConditionalGeneration": "0.5.20",
}
# Loads its own MTP layers as a draft when the same path is given as target and draft.
MTP_HINTS = ("MiMo", "Qwen3Next", "Qwen3_5", "Step3", "LongcatFlash", "NemotronH", "Ernie4_5")
MLA_ARCHITECTURES = ("Deepseek", "KimiK2", "KimiVL", "KimiLinear", "LongcatFlash", "GlmMoeDsa")
MLA_ONLY_BACKENDS = {"trtllm_mla", "flashmla", "cutlass_mla", "tokenspeed_mla"}
# Still named in the code of later releases, but only to say that they are gone.
REMOVED_VARIABLES = {"SGLANG_ENABLE_SPEC_V2": "0.5.14"}
NO_EFFECT_FLAGS = (
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_adaptive",
)


def tree_pool(steps: int, topk: int) -> int:
    """Nodes that the draft offers below the root: the first level, then topk by topk each."""
    return topk + (steps - 1) * topk * topk


def algorithm(setup: Setup) -> Iterator[Finding]:
    name = setup.algorithm
    if name is None:
        useless = [setup.reading.written[dest] for dest in NO_EFFECT_FLAGS if setup.given(dest)]
        if useless:
            yield Finding(
                "no-algorithm",
                WARNING,
                f"{', '.join(useless)} without --speculative-algorithm: the server will not "
                "speculate and does not say so",
                "add --speculative-algorithm EAGLE3 (or EAGLE, NEXTN, ...), or drop them",
            )
        return
    first = ALGORITHMS.get(name)
    if first is None:
        yield Finding(
            "unknown-algorithm",
            WARNING,
            f"--speculative-algorithm {name} is none of SGLang's own: a plugin must register it",
            f"SGLang {setup.release} has {', '.join(a for a in ALGORITHMS if _has(setup, a))}",
        )
    elif not setup.since(first):
        yield Finding(
            "unknown-algorithm",
            ERROR,
            f"--speculative-algorithm {name} is new in SGLang {first}",
            f"use that or a later release instead of {setup.release}",
        )


def _has(setup: Setup, name: str) -> bool:
    return setup.since(ALGORITHMS[name])


def three_values(setup: Setup) -> Iterator[Finding]:
    """Steps, topk and draft tokens: together or not at all, and they must fit each other."""
    if setup.algorithm not in EAGLE_FAMILY:
        return
    given = {dest: setup.number(dest) for dest in THREE if setup.given(dest)}
    steps, topk, draft = (given.get(dest) for dest in THREE)
    adaptive = bool(setup.get("speculative_adaptive"))
    if not given:
        if not adaptive:
            chosen = _auto_choice(setup)
            yield Finding(
                "values-chosen",
                NOTE,
                f"steps, topk and draft tokens are not given: SGLang takes {chosen}",
            )
        return
    if len(given) < 3 and not (adaptive and setup.since("0.5.14")):
        missing = [f"--{dest.replace('_', '-')}" for dest in THREE if dest not in given]
        fits = _fitting(steps, topk, draft)
        yield Finding(
            "values-incomplete",
            ERROR,
            f"{', '.join(missing)} missing: SGLang wants all three speculative values or none and "
            "stops with a bare AssertionError or TypeError",
            f"for example {fits}",
        )
        return
    if steps is None or topk is None or draft is None:
        return
    yield from _fit(steps, topk, draft)


def _fit(steps: int, topk: int, draft: int) -> Iterator[Finding]:
    if steps < 1 or topk < 1:
        yield Finding(
            "values-impossible",
            ERROR,
            f"steps {steps} and topk {topk} must be at least 1",
            f"for example {_flags(3, 1, 4)}",
        )
    elif topk == 1 and draft != steps + 1:
        yield Finding(
            "values-rewritten",
            WARNING,
            f"with topk 1 the draft is a chain of {steps} tokens below the root: SGLang rewrites "
            f"--speculative-num-draft-tokens {draft} to {steps + 1}",
            f"write {_flags(steps, 1, steps + 1)}",
        )
    elif topk > 1 and not 2 <= draft <= tree_pool(steps, topk) + 1:
        pool = tree_pool(steps, topk)
        yield Finding(
            "values-impossible",
            ERROR,
            f"{draft} draft tokens do not fit: {steps} steps with topk {topk} offer {pool} nodes, "
            "and the root counts as one token more",
            f"--speculative-num-draft-tokens between 2 and {pool + 1}",
        )


def _fitting(steps: int | None, topk: int | None, draft: int | None) -> str:
    """All three, keeping what was given."""
    topk = topk or 1
    if steps is None:
        steps = max((draft or 4) - 1, 1) if topk == 1 else 3
    if topk == 1:
        return _flags(steps, 1, steps + 1)
    return _flags(steps, topk, min(draft or 16, tree_pool(steps, topk) + 1))


def _flags(steps: int, topk: int, draft: int) -> str:
    return (
        f"--speculative-num-steps {steps} --speculative-eagle-topk {topk} "
        f"--speculative-num-draft-tokens {draft}"
    )


def _auto_choice(setup: Setup) -> str:
    if setup.algorithm == "STANDALONE":
        return _flags(3, 1, 4)
    if setup.architecture in ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM"):
        return _flags(5, 4, 8) + " (a tree: adaptive mode does not work with it)"
    if setup.architecture is None:
        return "3/1/4 for most targets and 5/4/8 for Llama and Grok"
    return _flags(3, 1, 4)


def draft_path(setup: Setup) -> Iterator[Finding]:
    name = setup.algorithm
    if name not in EAGLE_FAMILY or setup.given("speculative_draft_model_path"):
        return
    built_in = BUILT_IN_DRAFT.get(setup.architecture or "")
    if built_in is not None and setup.since(built_in) and name == "EAGLE":
        return
    if setup.architecture is None and name == "EAGLE":
        yield Finding(
            "no-draft",
            WARNING,
            "no --speculative-draft-model-path: fine only if the target brings its own draft "
            "(DeepSeek V3/R1, GLM-4.5, ...), which cannot be seen from here",
            "add it for any other target",
        )
        return
    if any(hint in (setup.architecture or "") for hint in MTP_HINTS) and name == "EAGLE":
        yield Finding(
            "no-draft",
            WARNING,
            f"{setup.architecture} may have MTP layers of its own, but this release does not fill "
            "in the draft path for it",
            f"add --speculative-draft-model-path {setup.get('model_path')}",
        )
        return
    yield Finding(
        "no-draft",
        ERROR,
        f"--speculative-algorithm {name} needs a draft model"
        + (f" and {setup.architecture} brings none" if setup.architecture else "")
        + ": SGLang loads the target twice and then dies with an AttributeError",
        "add --speculative-draft-model-path",
    )


def tree_drafts(setup: Setup) -> Iterator[Finding]:
    """topk above 1: which workers and attention backends can draft trees."""
    if setup.algorithm not in EAGLE_FAMILY or (setup.topk or 1) <= 1:
        return
    backends = setup.attention_backends
    if not setup.since("0.5.11") and setup.spec_v2_asked:
        yield Finding(
            "tree-draft",
            ERROR,
            f"SGLANG_ENABLE_SPEC_V2 and topk {setup.topk}: SGLang {setup.release} refuses, its v2 "
            "worker drafts chains only",
            "--speculative-eagle-topk 1, or unset the variable",
        )
    if setup.since("0.5.11") and not setup.since("0.5.13.post1"):
        yield Finding(
            "tree-draft",
            NOTE,
            f"topk {setup.topk} makes SGLang {setup.release} fall back to its v1 worker without "
            "overlap scheduling",
        )
    if "trtllm_mha" in backends:
        yield Finding(
            "tree-draft",
            ERROR,
            f"trtllm_mha knows chains only, not topk {setup.topk}",
            "--speculative-eagle-topk 1, or --attention-backend fa3, flashinfer or triton",
        )
    if (setup.number("page_size", 1) or 1) > 1:
        able = {"flashinfer", "fa3"} | ({"triton"} if setup.since("0.5.13.post1") else set())
        asked = setup.get("attention_backend")
        if asked is None:
            yield Finding(
                "tree-pages",
                WARNING,
                f"topk {setup.topk} with --page-size {setup.get('page_size')} works with "
                f"{', '.join(sorted(able))} only, and the backend is left to SGLang",
                "add --attention-backend, or --page-size 1",
            )
        elif asked not in able:
            yield Finding(
                "tree-pages",
                ERROR,
                f"topk {setup.topk} with --page-size {setup.get('page_size')}: SGLang "
                f"{setup.release} refuses it on {asked}",
                f"--page-size 1, or --attention-backend {' or '.join(sorted(able))}",
            )
    unproven = backends - {"fa3", "flashinfer", "triton", "trtllm_mha", "intel_amx"}
    if unproven:
        yield Finding(
            "tree-backend",
            WARNING,
            f"nothing is known about tree drafts (topk {setup.topk}) on {', '.join(unproven)}",
            "compare greedy output with and without speculation, or use topk 1",
        )


def mixed_chunk(setup: Setup) -> Iterator[Finding]:
    if not setup.get("enable_mixed_chunk") or setup.algorithm is None:
        return
    if setup.since("0.5.19") and setup.algorithm in EAGLE_FAMILY:
        yield Finding(
            "mixed-chunk",
            WARNING,
            "--enable-mixed-chunk: in a step that also prefills, running requests get one token "
            "without speculation",
            "remove --enable-mixed-chunk to keep speculating under prefill load",
        )
    else:
        yield Finding(
            "mixed-chunk",
            WARNING,
            f"--enable-mixed-chunk: SGLang {setup.release} switches it off under speculation (its "
            "assertion says the opposite of what it means)",
            "remove --enable-mixed-chunk",
        )


def adaptive(setup: Setup) -> Iterator[Finding]:
    """What makes SGLang's own adaptive mode fall back to static values, with a warning only."""
    if not setup.get("speculative_adaptive"):
        return
    reasons = []
    if setup.algorithm not in ("EAGLE", "EAGLE3"):
        reasons.append(f"the algorithm {setup.algorithm}")
    if setup.topk not in (None, 1):
        reasons.append(f"topk {setup.topk}")
    if setup.attention_dp:
        reasons.append("DP attention")
    if setup.release == "0.5.11" and not setup.get("disable_overlap_schedule"):
        reasons.append("overlap scheduling (in 0.5.11)")
    for dest in ("enable_multi_layer_eagle", "enable_two_batch_overlap", "enable_pdmux"):
        if setup.get(dest):
            reasons.append(f"--{dest.replace('_', '-')}")
    if reasons:
        yield Finding(
            "adaptive-off",
            WARNING,
            f"--speculative-adaptive does nothing with {' and '.join(reasons)}: SGLang goes on "
            "with static values",
            "drop one of them",
        )


def refused(setup: Setup) -> Iterator[Finding]:
    """Combinations that SGLang itself stops at."""
    name = setup.algorithm
    if name in ("STANDALONE", "NGRAM") and setup.attention_dp:
        yield Finding(
            "refused",
            ERROR,
            f"{name} speculation does not work with DP attention",
            "drop one of the two",
        )
    if name is not None and setup.get("speculative_use_rejection_sampling"):
        if name not in ("EAGLE", "EAGLE3"):
            yield Finding(
                "refused",
                ERROR,
                f"--speculative-use-rejection-sampling does not work with {name}",
                "drop it",
            )
        elif (setup.topk or 1) != 1:
            yield Finding(
                "refused",
                ERROR,
                f"--speculative-use-rejection-sampling wants a chain, not topk {setup.topk}",
                "--speculative-eagle-topk 1, or drop it",
            )
    if name is not None and (setup.number("pp_size", 1) or 1) > 1 and not setup.since("0.5.23"):
        yield Finding(
            "refused",
            WARNING,
            f"SGLang {setup.release} has no speculation over pipeline stages (new in 0.5.23)",
            "use --tp-size instead of --pp-size",
        )


def draft_backend(setup: Setup) -> Iterator[Finding]:
    """An MLA target with a draft that uses ordinary attention inherits a backend it cannot use."""
    if setup.algorithm != "EAGLE3" or setup.given("speculative_draft_attention_backend"):
        return
    names = setup.draft.get("architectures")
    draft = str(names[0]) if isinstance(names, list) and names else ""
    mla = any(part in (setup.architecture or "") for part in MLA_ARCHITECTURES)
    if not mla or "Deepseek" in draft:
        return
    asked = setup.attention_backends & MLA_ONLY_BACKENDS
    if asked:
        yield Finding(
            "draft-backend",
            ERROR,
            f"{setup.architecture} runs on {', '.join(asked)}, which the draft's attention "
            f"({draft or 'not MLA'}) cannot use but inherits",
            "--speculative-draft-attention-backend fa3, flashinfer or trtllm_mha",
        )
    elif not setup.attention_backends and draft:
        yield Finding(
            "draft-backend",
            WARNING,
            f"{setup.architecture} may get an MLA backend by default (trtllm_mla on Blackwell), "
            f"which {draft} cannot use",
            "--speculative-draft-attention-backend fa3, flashinfer or trtllm_mha",
        )


def own_flags(setup: Setup) -> Iterator[Finding]:
    """The plugin's flags, judged by the plugin's own code."""
    try:
        draft_check(setup.get(CHECK_KEYWORD), setup.environment)
    except SettingsError as error:
        yield Finding("draft-check", ERROR, str(error))
    try:
        wants_hooks(setup.algorithm, setup.environment)
    except SettingsError as error:
        yield Finding("eagle3-hooks", ERROR, str(error))
    try:
        settings = setup.settings()
        if settings is None:
            return
        arguments = setup.namespace()
        refusals.check(arguments, settings, workers.unfit_in(setup.release, arguments))
    except SettingsError as error:
        yield Finding("threshold", ERROR, str(error))


def capacity(setup: Setup) -> Iterator[Finding]:
    """Admission, threshold and captured graphs against each other, per data-parallel worker."""
    if setup.algorithm is None:
        return
    cap, workers, threshold = setup.running_cap, setup.dp_workers, setup.threshold
    share = None if cap is None else max(cap // workers, 1)
    if not setup.given("max_running_requests") and share is not None:
        each = f", {share} on each of {workers} DP workers" if workers > 1 else ""
        yield Finding(
            "running-cap",
            NOTE,
            f"--max-running-requests is not given: under speculation SGLang admits {cap} requests "
            f"at once{each}; a benchmark with more measures the queue",
            f"set it (without speculation SGLang would take what fits, not {DEFAULT_CAP})",
        )
    if threshold and share is not None and threshold >= share:
        yield Finding(
            "threshold-unreachable",
            WARNING,
            f"{THRESHOLD_FLAG} {threshold} is never exceeded: at most {share} requests run at once"
            f"{' per DP worker' if workers > 1 else ''}",
            f"raise --max-running-requests above {threshold * workers}, or lower the threshold",
        )
    graph = setup.largest_graph
    if setup.get("device") == "cpu":
        return
    if setup.graphs_off:
        yield Finding(
            "no-graphs",
            WARNING,
            "CUDA graphs are off: every step pays for its kernel launches, in both modes",
            "drop --disable-cuda-graph if it was for debugging",
        )
    elif graph is not None and share is not None and graph < share:
        yield Finding(
            "graphs-too-small",
            WARNING,
            f"graphs are captured up to batch {graph}, but {share} requests may run: the larger "
            "batches run without a graph, much slower",
            f"{_graph_flag(setup)} {share}, or --max-running-requests {graph * workers}",
        )
    if graph is not None and threshold and graph < threshold and not setup.graphs_off:
        yield Finding(
            "graphs-too-small",
            WARNING,
            f"graphs end at batch {graph}, below the threshold {threshold}: speculation between "
            "the two runs without a graph",
            f"{_graph_flag(setup)} {threshold} or more",
        )


def _graph_flag(setup: Setup) -> str:
    return "--cuda-graph-max-bs-decode" if setup.since("0.5.14") else "--cuda-graph-max-bs"


def environment(setup: Setup) -> Iterator[Finding]:
    """SGLang's variables that this release never reads."""
    removed = {name for name, release in REMOVED_VARIABLES.items() if setup.since(release)}
    known = set(variables(setup.release)) - removed
    for name in sorted(setup.environment):
        ours = name.startswith("SGLANG_SPEC_EXT_")
        if not name.startswith(("SGLANG_", "SGL_")) or name in known or ours:
            continue
        gone = REMOVED_VARIABLES.get(name)
        others = before(gone) if gone else releases_with_variable(name)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        where = f"SGLang {describe(others)} read it" if others else "no known release reads it"
        yield Finding(
            "variable-unread",
            WARNING,
            f"{name} does nothing in SGLang {setup.release}: {where}",
            f"did you mean {close[0]}?" if close else "drop it",
        )


RULES: tuple[Rule, ...] = (
    algorithm,
    three_values,
    draft_path,
    tree_drafts,
    mixed_chunk,
    adaptive,
    refused,
    draft_backend,
    own_flags,
    capacity,
    environment,
)
