"""What we touch in SGLang, as data, and a check of it that imports nothing of SGLang.

Each touch point is a name in SGLang that we hook, call or read, with the parameters that we rely
on. Where releases differ, one name has several places; the first that holds in the installed
sources is the one in use, so no other module needs to know a release number. Places of one
qualname are used alike; where the use differs too, the qualname tells `sglang_api` which it is.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["function", "method", "staticmethod", "classmethod", "attribute", "field", "class"]
"""An attribute is of a class, a field what a method of it gives its object."""

# Releases on which the engine tests run. Others run when every contract holds.
TESTED_RELEASES = ("0.5.9", "0.5.23")
OLDEST_RELEASE, NEWEST_RELEASE = "0.5.11", "0.5.23"

SEAM = "seam"
"""What the diffs of `patches/` call the decorator of `seams` in SGLang's sources."""


@dataclass(frozen=True)
class TouchPoint:
    """One place in SGLang that we depend on.

    Attributes:
        name: our name for it; several touch points of one name are alternatives.
        module: dotted module that defines it.
        qualname: ``Class.attribute`` or ``function`` inside that module.
        kind: what it must be there.
        parameters: names that its signature must begin with, after self or cls; where we are the
            caller, parameters beyond these must have defaults. None: any signature will do.
        process: where we use it.
        why: what for.
        hooked: True where we wrap it, False where we only call or read it.
        keywords: further parameters that it must have, wherever in the signature they are.
    """

    name: str
    module: str
    qualname: str
    kind: Kind
    parameters: tuple[str, ...] | None
    process: Literal["launcher", "scheduler"]
    why: str
    hooked: bool = True
    keywords: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        return f"{self.module}.{self.qualname}"


_ENGINE = "sglang.srt.entrypoints.engine"
_SERVER_ARGS = "sglang.srt.server_args"
_WORKER = "sglang.srt.speculative.eagle_worker_v2"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter"
_METRICS_MIXIN = "sglang.srt.observability.scheduler_metrics_mixin"
_OUTPUT_MIXIN = "sglang.srt.managers.scheduler_output_processor_mixin"
_SPEC_UTILS = "sglang.srt.speculative.spec_utils"
_MOE_UTILS = "sglang.srt.layers.moe.utils"

# The argument seam is bound in every launcher, else the flag could not exist. Everything after it
# is bound only when the flag is given.
ARGUMENT_SEAM = (
    TouchPoint(
        "add_cli_args", _SERVER_ARGS, "ServerArgs.add_cli_args", "staticmethod", ("parser",),
        "launcher", "adds our flags to the command line",
    ),
    TouchPoint(
        "from_cli_args", _SERVER_ARGS, "ServerArgs.from_cli_args", "classmethod", ("args",),
        "launcher", "reads our flags off the parsed command line onto the record",
    ),
    TouchPoint(
        "server_args_class", _ENGINE, "Engine.server_args_class", "attribute", None,
        "launcher", "takes our keywords out of Engine(**kwargs) before ServerArgs refuses them",
    ),
)  # fmt: skip

LAUNCHER = (
    TouchPoint(
        "check_server_args", _SERVER_ARGS, "ServerArgs.check_server_args", "method", (),
        "launcher", "refuses combinations that are not built, on the resolved arguments",
    ),
    TouchPoint(
        "launch_subprocesses", _ENGINE, "Engine._launch_subprocesses", "classmethod",
        ("server_args",),
        "launcher", "hands the settings to the spawned processes; asks whether they were bound",
    ),
    TouchPoint(
        "admission_cap", "sglang.srt.arg_groups.speculative_hook", "_handle_eagle_family",
        "function", ("server_args",),
        "launcher", "keeps the admission cap of a server without speculation",
    ),
    TouchPoint(
        "admission_cap", _SERVER_ARGS, "ServerArgs._handle_speculative_decoding", "method", (),
        "launcher", "keeps the admission cap of a server without speculation",
    ),
    TouchPoint(
        "request_spec_metrics", "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager._calculate_spec_decoding_metrics", "method",
        ("meta_info", "recv_obj", "i"),
        "launcher", "per-request accept length over verify steps only",
    ),
    TouchPoint(
        "relay_update", "sglang.srt.managers.tokenizer_control_mixin",
        "TokenizerControlMixin.set_internal_state", "method", ("obj",),
        "launcher", "says why /set_internal_state refuses our values",
    ),
    TouchPoint(
        "relay_update", "sglang.srt.managers.tokenizer_communicator_mixin",
        "TokenizerCommunicatorMixin.set_internal_state", "method", ("obj",),
        "launcher", "says why /set_internal_state refuses our values",
    ),
)  # fmt: skip

SCHEDULER = (
    TouchPoint(
        "forward_batch_generation", _WORKER, "EAGLEWorkerV2.forward_batch_generation", "method",
        ("batch", "on_publish"),
        "scheduler", "decides the mode of each decode step and runs the target-only ones",
    ),
    TouchPoint(
        "forward_batch_generation", _WORKER, "EAGLEWorkerV2.forward_batch_generation", "method",
        ("model_worker_batch",),
        "scheduler", "decides the mode of each decode step and runs the target-only ones",
    ),
    TouchPoint(
        "init_info", "sglang.srt.managers.scheduler", "Scheduler.get_init_info", "method", (),
        "scheduler", "tells the launcher that the hooks are bound in this process",
    ),
    TouchPoint(
        "resolve_spec_tokens", _PROCESSOR, "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "method", ("result", "batch"),
        "scheduler", "does not count target-only steps as verifies of a request",
    ),
    TouchPoint(
        "resolve_spec_tokens", _OUTPUT_MIXIN,
        "SchedulerOutputProcessorMixin._resolve_spec_overlap_tokens", "method",
        ("result", "batch"),
        "scheduler", "does not count target-only steps as verifies of a request",
    ),
    TouchPoint(
        "resolve_spec_tokens", _OUTPUT_MIXIN,
        "SchedulerOutputProcessorMixin._resolve_spec_overlap_token_ids", "method",
        ("result", "batch"),
        "scheduler", "the same, where requests that have ended are counted too",
    ),
    TouchPoint(
        "update_spec_metrics", _REPORTER, "SchedulerMetricsReporter.update_spec_metrics", "method",
        ("bs", "num_correct_drafts"),
        "scheduler", "does not count target-only steps into the server's accept length",
    ),
    *(
        TouchPoint(
            "update_spec_metrics", _METRICS_MIXIN, "SchedulerMetricsMixin.update_spec_metrics",
            "method", ("bs", drafts),
            "scheduler", "does not count target-only steps into the server's accept length",
        )
        for drafts in ("num_correct_drafts", "num_accepted_drafts")
    ),
    TouchPoint(
        "report_decode_stats", _REPORTER, "SchedulerMetricsReporter.report_decode_stats", "method",
        ("can_run_cuda_graph",),
        "scheduler", "no accept length in a decode report without a verify",
    ),
    TouchPoint(
        "report_decode_stats", _METRICS_MIXIN, "SchedulerMetricsMixin.report_decode_stats",
        "method", ("can_run_cuda_graph",),
        "scheduler", "no accept length in a decode report without a verify",
    ),
    TouchPoint(
        "graph_sizes", "sglang.srt.model_executor.runner.base_cuda_graph_runner",
        "get_batch_sizes_to_capture", "function", ("model_runner",),
        "scheduler", "captures verify and draft graphs only for batch sizes that can speculate",
    ),
    TouchPoint(
        "graph_sizes", "sglang.srt.model_executor.cuda_graph_runner",
        "get_batch_sizes_to_capture", "function", ("model_runner",),
        "scheduler", "captures verify and draft graphs only for batch sizes that can speculate",
    ),
    TouchPoint(
        "get_internal_state", "sglang.srt.managers.scheduler", "Scheduler.get_internal_state",
        "method", ("recv_req",),
        "scheduler", "shows our state in /server_info",
    ),
    TouchPoint(
        "set_internal_state", "sglang.srt.managers.scheduler", "Scheduler.set_internal_state",
        "method", ("recv_req",),
        "scheduler", "changes N and M of a running server",
    ),
)  # fmt: skip

# Bound where EAGLE3 or DFLASH drafts, also without the flag: see eagle3_hooks.
LOADING = (
    TouchPoint(
        "load_model", "sglang.srt.model_executor.model_runner", "ModelRunner.load_model", "method",
        (),
        "scheduler", "gives the loaded target the hooks that its class lacks; arms the check",
    ),
    TouchPoint(
        "initialize_model", "sglang.srt.model_loader.loader", "_initialize_model", "function",
        ("model_config", "load_config"),
        "scheduler", "refuses a target that wraps a model without hooks, before weights load",
    ),
)  # fmt: skip

# What that needs besides.
LOADING_CALLED = (
    TouchPoint(
        "model_architecture", "sglang.srt.model_loader.utils", "get_model_architecture",
        "function", ("model_config",),
        "scheduler", "the target's class before its weights load", hooked=False,
    ),
    TouchPoint(
        "logits_processor", "sglang.srt.layers.logits_processor", "LogitsProcessor.forward",
        "method", ("input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"),
        "scheduler", "where the captured states must arrive", hooked=False,
    ),
)  # fmt: skip

_FLAG_DECIDES = (
    "hidden states out of the plain decode graphs: all or none, by the flag of the server and, at "
    "replay, by the batch"
)
_LABELS = "whether this process reports metrics, and with which labels"
_READ_DONE = "lets the next step be prepared while the target's forward runs"
_PLAIN_SIZES = "plain decode graphs for the batch sizes of a server that never speculates"
_OWN_LOGITS = "the logits buffer of the plain decode graphs: every graph runner makes its own"

# Called or read, never wrapped.
CALLED = (
    TouchPoint(
        "draft_extend", _WORKER, "EagleDraftWorker._draft_extend_for_decode", "method",
        ("batch", "batch_result"),
        "scheduler", "draft extend: on resume, and per step for drafts without a KV-only write",
        hooked=False,
    ),
    TouchPoint(
        "target_forward", "sglang.srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation", "method", ("batch",),
        "scheduler", "the target's plain decode, sampling included", hooked=False,
    ),
    TouchPoint(
        "target_forward", "sglang.srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation", "method", ("model_worker_batch",),
        "scheduler", "the target's plain decode, sampling included", hooked=False,
    ),
    TouchPoint(
        "hidden_mode_of_forward", "sglang.srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation", "method", ("batch",),
        "scheduler", "hidden states out of the target's plain decode", hooked=False,
        keywords=("capture_hidden_mode",),
    ),
    TouchPoint(
        "hidden_mode_of_forward", "sglang.srt.managers.schedule_batch",
        "ScheduleBatch.capture_hidden_mode", "attribute", None,
        "scheduler", "hidden states out of the target's plain decode", hooked=False,
    ),
    TouchPoint(
        "hidden_mode_of_forward", "sglang.srt.managers.schedule_batch",
        "ModelWorkerBatch.capture_hidden_mode", "attribute", None,
        "scheduler", "hidden states out of the target's plain decode", hooked=False,
    ),
    TouchPoint(
        "prefill_lengths", "sglang.srt.managers.schedule_batch", "ScheduleBatch.extend_lens",
        "attribute", None,
        "scheduler", "where each request's last token is in a prefill", hooked=False,
    ),
    TouchPoint(
        "new_lengths", "sglang.srt.managers.utils", "GenerationBatchResult.new_seq_lens",
        "attribute", None,
        "scheduler", "tells the scheduler the new sequence lengths", hooked=False,
    ),
    TouchPoint(
        "new_lengths", "sglang.srt.speculative.eagle_info", "EagleDraftInput.verify_done",
        "attribute", None,
        "scheduler", "tells the scheduler the new sequence lengths, and when they are there",
        hooked=False,
    ),
    TouchPoint(
        "last_shared_read", _WORKER, "EAGLEWorkerV2.last_shared_read_runner", "method", (),
        "scheduler", _READ_DONE, hooked=False,
    ),
    TouchPoint(
        "last_shared_read", _WORKER, "EAGLEWorkerV2.war_fastpath_runner", "method", (),
        "scheduler", _READ_DONE, hooked=False,
    ),
    TouchPoint(
        "last_shared_read", "sglang.srt.model_executor.cuda_graph_runner",
        "CudaGraphRunner.replay", "method", ("forward_batch",),
        "scheduler", "says nothing of its reads: the scheduler waits for the whole forward",
        hooked=False,
    ),
    TouchPoint(
        "draft_kv_projection", "sglang.srt.models.llama", "LlamaAttention.forward_prepare_native",
        "method", ("positions", "hidden_states"),
        "scheduler", "K and V of the draft layer, RoPE included", hooked=False,
    ),
    TouchPoint(
        "unquantized_linear", "sglang.srt.layers.quantization.unquant", "UnquantizedLinearMethod",
        "class", None,
        "scheduler", "whether K and V can be projected without the queries", hooked=False,
    ),
    TouchPoint(
        "kv_write_location", "sglang.srt.mem_cache.memory_pool", "KVWriteLoc", "class", None,
        "scheduler", "where the KV-only write stores", hooked=False,
    ),
    TouchPoint(
        "kv_write_location", "sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer",
        "method", ("layer", "loc", "cache_k", "cache_v", "k_scale", "v_scale"),
        "scheduler", "where the KV-only write stores: a pool that takes the slots themselves",
        hooked=False,
    ),
    TouchPoint(
        "mha_pool", "sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool", "class", None,
        "scheduler", "the one KV pool that the KV-only write knows", hooked=False,
    ),
    TouchPoint(
        "hybrid_request_pool", "sglang.srt.mem_cache.memory_pool", "HybridReqToTokenPool", "class",
        None,
        "scheduler", "tells targets with recurrent state, which are refused", hooked=False,
    ),
    TouchPoint(
        "recurrent_hidden_spec", "sglang.srt.speculative.eagle_utils",
        "get_draft_recurrent_hidden_state_spec", "function", ("model_runner",),
        "scheduler", "shape and dtype of the hidden state in a draft input", hooked=False,
    ),
    TouchPoint(
        "recurrent_hidden_spec", "sglang.srt.speculative.eagle_info",
        "EagleDraftInput.hidden_size_for", "classmethod", ("worker",),
        "scheduler", "shape of the hidden state in a draft input; its dtype is beside it",
        hooked=False,
    ),
    TouchPoint(
        "recurrent_hidden_spec", "sglang.srt.speculative.eagle_info",
        "EagleDraftInput.verified_id", "attribute", None,
        "scheduler", "tells an input that has a hidden state whatever the draft", hooked=False,
    ),
    TouchPoint(
        "draft_input", "sglang.srt.speculative.eagle_info", "EagleDraftInput", "class", None,
        "scheduler", "what a step hands to the next one", hooked=False,
    ),
    TouchPoint(
        "bonus_tokens", "sglang.srt.speculative.eagle_info", "EagleDraftInput.bonus_tokens",
        "attribute", None,
        "scheduler", "the tokens that a step consumes", hooked=False,
    ),
    TouchPoint(
        "bonus_tokens", "sglang.srt.speculative.eagle_info", "EagleDraftInput.verified_id",
        "attribute", None,
        "scheduler", "the tokens that a step consumes", hooked=False,
    ),
    TouchPoint(
        "relay", "sglang.srt.managers.overlap_utils", "FutureMap.need_topk", "field", None,
        "scheduler", "leaves out of the relay what a target-only step has nothing to say about",
        hooked=False,
    ),
    TouchPoint(
        "relay", "sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.supports_spec_v2",
        "method", (),
        "scheduler", "knows of no algorithm what it needs of the relay, which takes everything",
        hooked=False,
    ),
    TouchPoint(
        "stride", "sglang.srt.managers.utils",
        "GenerationBatchResult.speculative_num_draft_tokens", "attribute", None,
        "scheduler", "says that a step made one token per request", hooked=False,
    ),
    TouchPoint(
        "stride", _OUTPUT_MIXIN,
        "SchedulerOutputProcessorMixin._resolve_spec_overlap_token_ids", "method",
        ("result", "batch"),
        "scheduler", "takes each request's tokens out of as many as a verify has", hooked=False,
    ),
    TouchPoint(
        "draft_tp_context", _SPEC_UTILS, "draft_tp_context", "function", None,
        "scheduler", "the draft's tensor-parallel group", hooked=False,
    ),
    TouchPoint(
        "moe_backend_context", _MOE_UTILS, "speculative_moe_backend_context", "function", (),
        "scheduler", "the draft's MoE backend", hooked=False,
    ),
    TouchPoint(
        "moe_a2a_context", _MOE_UTILS, "speculative_moe_a2a_backend_context", "function", (),
        "scheduler", "the draft's MoE all-to-all backend", hooked=False,
    ),
    TouchPoint(
        "attention_backend", "sglang.srt.model_executor.model_runner",
        "ModelRunner._get_attention_backend", "method", ("init_new_workspace",),
        "scheduler", "an attention backend of its own for the plain decode graphs", hooked=False,
    ),
    TouchPoint(
        "hidden_states_mode", "sglang.srt.model_executor.forward_batch_info",
        "get_server_return_hidden_states_mode", "function", None,
        "scheduler", "hidden states out of the plain decode graphs", hooked=False,
    ),
    TouchPoint(
        "hidden_states_mode", "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.recapture_if_needed", "method", ("forward_batch",),
        "scheduler", _FLAG_DECIDES, hooked=False,
    ),
    TouchPoint(
        "hidden_states_mode", "sglang.srt.model_executor.cuda_graph_runner",
        "CudaGraphRunner.recapture_if_needed", "method", ("forward_batch",),
        "scheduler", _FLAG_DECIDES, hooked=False,
    ),
    TouchPoint(
        "decode_graph_runner", "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner", "class", None,
        "scheduler", "the plain decode graphs", hooked=False,
    ),
    TouchPoint(
        "decode_graph_runner", "sglang.srt.model_executor.cuda_graph_runner", "CudaGraphRunner",
        "class", None,
        "scheduler", "the plain decode graphs", hooked=False,
    ),
    TouchPoint(
        "graph_output", "sglang.srt.model_executor.graph_shared_output",
        "GraphSharedOutput.create_for_model_runner", "classmethod", ("model_runner",),
        "scheduler", "the logits buffer of the plain decode graphs", hooked=False,
    ),
    TouchPoint(
        "graph_output", "sglang.srt.model_executor.runner_utils.buffers",
        "DecodeInputBuffers.create", "classmethod", None,
        "scheduler", _OWN_LOGITS, hooked=False, keywords=("vocab_size",),
    ),
    TouchPoint(
        "graph_output", "sglang.srt.model_executor.cuda_graph_runner",
        "DecodeInputBuffers.create", "classmethod", None,
        "scheduler", _OWN_LOGITS, hooked=False, keywords=("vocab_size",),
    ),
    TouchPoint(
        "graph_output", "sglang.srt.model_executor.cuda_graph_runner", "_allocate_decode_buffers",
        "function", None,
        "scheduler", _OWN_LOGITS, hooked=False, keywords=("vocab_size",),
    ),
    TouchPoint(
        "generated_sizes", "sglang.srt.arg_groups.cuda_graph_hook",
        "generate_decode_cuda_graph_batch_sizes", "function", ("server_args", "max_bs"),
        "scheduler", _PLAIN_SIZES, hooked=False,
    ),
    TouchPoint(
        "generated_sizes", "sglang.srt.server_args",
        "ServerArgs._generate_decode_cuda_graph_batch_sizes", "method", ("max_bs",),
        "scheduler", _PLAIN_SIZES, hooked=False,
    ),
    TouchPoint(
        "generated_sizes", "sglang.srt.server_args",
        "ServerArgs._generate_cuda_graph_batch_sizes", "method", (),
        "scheduler", _PLAIN_SIZES, hooked=False,
    ),
    TouchPoint(
        "read_internal_state", "sglang.srt.managers.tokenizer_control_mixin",
        "TokenizerControlMixin.get_internal_state", "method", (),
        "launcher", "asks the scheduler why it refused our values", hooked=False,
    ),
    TouchPoint(
        "read_internal_state", "sglang.srt.managers.tokenizer_communicator_mixin",
        "TokenizerCommunicatorMixin.get_internal_state", "method", (),
        "launcher", "asks the scheduler why it refused our values", hooked=False,
    ),
    TouchPoint(
        "internal_state_answer", "sglang.srt.managers.io_struct", "SetInternalStateReqOutput",
        "class", None,
        "scheduler", "the answer to a change of N and M", hooked=False,
    ),
    TouchPoint(
        "metrics_collector", "sglang.srt.observability.metrics_collector",
        "SchedulerMetricsCollectorContext.collector", "attribute", None,
        "scheduler", _LABELS, hooked=False,
    ),
    TouchPoint(
        "metrics_collector", "sglang.srt.observability.scheduler_metrics_mixin",
        "SchedulerMetricsMixin.init_metrics", "method", None,
        "scheduler", _LABELS, hooked=False,
    ),
    TouchPoint(
        "metrics_collector", "sglang.srt.managers.scheduler_metrics_mixin",
        "SchedulerMetricsMixin.init_metrics", "method", None,
        "scheduler", _LABELS, hooked=False,
    ),
    TouchPoint(
        "graph_capture", "sglang.srt.distributed.parallel_state", "graph_capture", "function", (),
        "scheduler", "the KV-only write's graphs", hooked=False,
    ),
)  # fmt: skip

TOUCH_POINTS = ARGUMENT_SEAM + LAUNCHER + SCHEDULER + LOADING + LOADING_CALLED + CALLED


def site_dir() -> Path | None:
    """Directory that holds the ``sglang`` package which this interpreter would import."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def check(site: Path | None = None, points: tuple[TouchPoint, ...] = TOUCH_POINTS) -> list[str]:
    """Sentences for what does not hold in the sources under ``site``; empty when all does.

    Args:
        site: directory that contains ``sglang/``; default the one that would be imported.
    """
    site = site or site_dir()
    if site is None:
        return ["sglang is not installed in this environment"]
    problems = []
    for name in dict.fromkeys(point.name for point in points):
        places = [point for point in points if point.name == name]
        gaps = [gap(place, site) for place in places]
        if all(gaps):
            problems.append("; or ".join(text for text in gaps if text))
    return problems


def holding(
    name: str, site: Path | None = None, points: tuple[TouchPoint, ...] = TOUCH_POINTS
) -> TouchPoint | None:
    """The place of touch point ``name`` in the installed sources, None if there is none."""
    site = site or site_dir()
    if site is None:
        return None
    return next((p for p in points if p.name == name and not gap(p, site)), None)


def in_use(points: tuple[TouchPoint, ...], site: Path | None = None) -> tuple[TouchPoint, ...]:
    """One place per name among ``points``: the one that holds, else the first of them.

    So a name that has no place stays in the answer, and whoever binds it finds it missing.
    """
    first = {point.name: point for point in reversed(points)}
    return tuple(
        holding(name, site, points) or first[name]
        for name in dict.fromkeys(point.name for point in points)
    )


def gap(point: TouchPoint, site: Path) -> str | None:
    """What is wrong with one touch point in the sources under ``site``, None if nothing."""
    path = site.joinpath(*point.module.split("."))
    source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    if not source.exists():
        return f"{point.target}: there is no module {point.module}"
    found = _definitions(source).get(point.qualname)
    # what a method gives an object under a name is no sign that the class still has it
    if found is None or (found.kind == "field" and point.kind != "field"):
        return f"{point.target}: not found in {point.module}"
    kind, parameters, _ = found
    if kind != point.kind:
        return f"{point.target}: expected a {point.kind}, found a {kind}"
    names = [name for name, _ in parameters]
    for keyword in point.keywords:
        if keyword not in names:
            return f"{point.target}: no parameter {keyword}, found ({', '.join(names)})"
    if point.parameters is None:
        return None
    wanted = list(point.parameters)
    required_beyond = [name for name, required in parameters[len(wanted) :] if required]
    if names[: len(wanted)] != wanted or (required_beyond and not point.hooked):
        return (
            f"{point.target}: expected parameters ({', '.join(wanted)}), found ({', '.join(names)})"
        )
    return None


def seamed(point: TouchPoint, site: Path) -> bool:
    """Whether a diff of `patches/` has put a seam on the touch point in the sources there."""
    source = site.joinpath(*point.module.split(".")).with_suffix(".py")
    found = _definitions(source).get(point.qualname) if source.exists() else None
    return found is not None and found.seamed


class _Definition(NamedTuple):
    """parameters: (name, required)s; seamed: has our decorator, or is an attribute in a seam."""

    kind: str
    parameters: list[tuple[str, bool]]
    seamed: bool = False


def _definitions(source: Path) -> dict[str, _Definition]:
    """Every function, class, method, attribute and field of a file."""
    return _parsed(source.read_bytes())


# By content: releases and patched copies have most of it in common.
@cache
def _parsed(source: bytes) -> dict[str, _Definition]:
    found: dict[str, _Definition] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = _Definition("class", [])
                visit(node.body, prefix + node.name + ".")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(prefix + node.name, _function(node, in_class=bool(prefix)))
                if prefix:
                    for name in _fields(node):
                        found.setdefault(prefix + name, _Definition("field", []))
            elif prefix and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                in_seam = isinstance(node.value, ast.Call) and _is_seam(node.value.func)
                found[prefix + node.target.id] = _Definition("attribute", [], in_seam)
            elif prefix and isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found[prefix + target.id] = _Definition("attribute", [])
            elif isinstance(node, ast.If | ast.Try):
                visit(node.body, prefix)
                visit(node.orelse, prefix)

    with _collection_paused():
        visit(ast.parse(source).body, "")
    return found


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """A tree is hundreds of thousands of objects for a moment. Beside all that a server has loaded
    by then they set off full collections, of half a second each; and a tree needs none to go."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fields(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Names of what a method gives its object, whatever happens in it."""
    for node in method.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr


def _is_seam(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == SEAM


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> _Definition:
    decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    kind = "method" if in_class else "function"
    for decorator in ("staticmethod", "classmethod"):
        if decorator in decorators:
            kind = decorator
    positional = node.args.posonlyargs + node.args.args
    required = len(positional) - len(node.args.defaults)
    parameters = [(arg.arg, i < required) for i, arg in enumerate(positional)]
    parameters += [
        (arg.arg, default is None)
        for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    if kind in ("method", "classmethod"):
        parameters = parameters[1:]
    return _Definition(kind, parameters, SEAM in decorators)
