"""What we touch in releases whose speculative worker is `EAGLEWorker`, spec-v1 (data only).

That worker commits the tokens of a verify itself, so its steps cannot overlap the scheduler's. The
target-only step needs none of that: it makes a decode batch plain for one step, and SGLang's own
code for plain decode, in the scheduler, does everything around the target's forward.
"""

from __future__ import annotations

from sglang_spec_ext.compat import contracts
from sglang_spec_ext.compat.contracts import TouchPoint

_ENGINE = "sglang.srt.entrypoints.engine"
_WORKER = "sglang.srt.speculative.eagle_worker"
_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_EAGLE_INFO = "sglang.srt.speculative.eagle_info"
_POOL = "sglang.srt.mem_cache.memory_pool"
_GRAPHS = "sglang.srt.model_executor.cuda_graph_runner"

# Before the launch was a method of Engine.
LAUNCH_FUNCTION = TouchPoint(
    "launch_subprocesses_function", _ENGINE, "_launch_subprocesses", "function", ("server_args",),
    "launcher", "hands the settings to the spawned processes; asks whether they were bound",
)  # fmt: skip

WORKER = TouchPoint(
    "forward_batch_generation_v1", _WORKER, "EAGLEWorker.forward_batch_generation", "method",
    ("batch",),
    "scheduler", "decides the mode of each decode step and runs the target-only ones",
)  # fmt: skip

_SCHEDULER_HOOKS = (
    WORKER,
    TouchPoint(
        "process_decode", "sglang.srt.managers.scheduler_output_processor_mixin",
        "SchedulerOutputProcessorMixin.process_batch_result_decode", "method",
        ("batch", "result"),
        "scheduler", "commits the tokens of target-only steps as those of a plain server",
    ),
    TouchPoint(
        "graph_sizes", _GRAPHS, "get_batch_sizes_to_capture", "function", ("model_runner",),
        "scheduler", "captures verify and draft graphs only for batch sizes that can speculate",
    ),
    TouchPoint(
        "device_graphs", "sglang.srt.model_executor.model_runner", "ModelRunner.init_device_graphs",
        "method", (),
        "scheduler", "graphs of the layers that the draft was trained on; see eagle3_hooks.layers",
    ),
    TouchPoint(
        "target_embeds", "sglang.srt.managers.mm_utils", "embed_mm_inputs", "function",
        ("mm_inputs_list",),
        "scheduler", "keeps what the target embedded of an image; see eagle3_hooks.embeddings",
    ),
    TouchPoint(
        "draft_embeds", "sglang.srt.models.llama_eagle3", "LlamaModel.forward", "method",
        ("input_ids", "positions", "forward_batch", "input_embeds"),
        "scheduler", "hands it to the draft, one token on",
    ),
)  # fmt: skip

(_INIT_INFO,) = (p for p in contracts.SCHEDULER if p.name == "init_info")

_METRICS = (
    TouchPoint(
        "update_spec_metrics", "sglang.srt.observability.scheduler_metrics_mixin",
        "SchedulerMetricsMixin.update_spec_metrics", "method", ("bs",),
        "scheduler", "counts the tokens of verifies",
    ),
    TouchPoint(
        "report_decode_stats", "sglang.srt.observability.scheduler_metrics_mixin",
        "SchedulerMetricsMixin.report_decode_stats", "method", ("can_run_cuda_graph",),
        "scheduler", "no accept length in a decode report without a verify",
    ),
)  # fmt: skip

# Of workers that advance the positions before a step of the draft instead of after it.
_DRAFT_POSITIONS = TouchPoint(
    "draft_positions", _WORKER, "EAGLEWorker.draft_forward", "method", ("forward_batch",),
    "scheduler", "puts the draft's decode steps right after its prefill; see eagle3_hooks",
)  # fmt: skip

# Before the scheduler made its own handshake, and under the mixin's former names.
_FIRST_SCHEDULER_HOOKS = (
    _DRAFT_POSITIONS,
    TouchPoint(
        "init_model_worker", _SCHEDULER, "Scheduler.init_model_worker", "method", (),
        "scheduler", "makes the target-only step before the server is ready",
    ),
    TouchPoint(
        "scheduler_process", _SCHEDULER, "run_scheduler_process", "function",
        ("server_args", "port_args", "gpu_id", "tp_rank", "attn_cp_rank", "moe_dp_rank",
         "moe_ep_rank", "pp_rank", "dp_rank", "pipe_writer"),
        "scheduler", "tells the launcher that the hooks are bound in this process",
    ),
    TouchPoint(
        "update_spec_metrics", "sglang.srt.managers.scheduler_metrics_mixin",
        "SchedulerMetricsMixin.update_spec_metrics", "method", ("bs",),
        "scheduler", "counts the tokens of verifies",
    ),
    TouchPoint(
        "report_decode_stats", "sglang.srt.managers.scheduler_metrics_mixin",
        "SchedulerMetricsMixin.log_decode_stats", "method", ("can_run_cuda_graph",),
        "scheduler", "no accept length in a decode report without a verify",
    ),
)  # fmt: skip

# Called or read, never wrapped.
_CALLED = (
    TouchPoint(
        "plain_prepare", _BATCH, "ScheduleBatch.prepare_for_decode", "method", (),
        "scheduler", "slots, lengths and penalties of a plain decode step", hooked=False,
    ),
    TouchPoint(
        "model_worker_batch", _BATCH, "ScheduleBatch.get_model_worker_batch", "method", (),
        "scheduler", "what the target's forward reads of the batch", hooked=False,
    ),
    TouchPoint(
        "target_forward_v1", "sglang.srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation", "method", ("model_worker_batch",),
        "scheduler", "the target's plain decode, sampling included", hooked=False,
    ),
    TouchPoint(
        "batch_copy", _BATCH, "ScheduleBatch.copy", "method", (),
        "scheduler", "what the scheduler commits while the next step runs", hooked=False,
    ),
    TouchPoint(
        "tokens_to_host", "sglang.srt.managers.utils", "GenerationBatchResult.copy_to_cpu",
        "method", ("return_logprob",),
        "scheduler", "brings the tokens there meanwhile", hooked=False,
    ),
    *(
        TouchPoint(
            f"batch_{name}", _BATCH, f"ScheduleBatch.{name}", "attribute", None,
            "scheduler", "tells a step whose output the next one needs on the host", hooked=False,
        )
        for name in ("has_grammar", "return_hidden_states")
    ),
    TouchPoint(
        "custom_processor", "sglang.srt.sampling.sampling_batch_info",
        "SamplingBatchInfo.has_custom_logit_processor", "attribute", None,
        "scheduler", "the same", hooked=False,
    ),
    TouchPoint(
        "draft_extend_v1", _WORKER, "EAGLEWorker.forward_draft_extend_after_decode", "method",
        ("batch",),
        "scheduler", "draft extend: on resume, and per step for drafts without a KV-only write",
        hooked=False,
    ),
    TouchPoint(
        "draft_input_filter", _EAGLE_INFO, "EagleDraftInput.filter_batch", "method",
        ("new_indices", "has_been_filtered"),
        "scheduler", "drops requests that a target-only step finished", hooked=False,
    ),
    TouchPoint(
        "kv_write_location", _POOL, "MHATokenToKVPool.set_kv_buffer", "method",
        ("layer", "loc", "cache_k", "cache_v", "k_scale", "v_scale"),
        "scheduler", "where the KV-only write stores", hooked=False,
    ),
    TouchPoint(
        "draft_tp_context", "sglang.srt.speculative.spec_utils", "draft_tp_context", "function",
        ("tp_group",),
        "scheduler", "the draft's tensor-parallel group", hooked=False,
    ),
    TouchPoint(
        "decode_graph_runner", _GRAPHS, "CudaGraphRunner", "class", None,
        "scheduler", "the plain decode graphs", hooked=False,
    ),
    TouchPoint(
        "hidden_states_mode", _GRAPHS, "CudaGraphRunner.recapture_if_needed", "method",
        ("forward_batch",),
        "scheduler", "hidden states out of the plain decode graphs, by a flag of the server",
        hooked=False,
    ),
)  # fmt: skip

# What is not the worker's own is touched as around spec-v2: launcher, control requests, and
# what both workers share of models, pools and graphs.
_CONTROL = tuple(p for p in contracts.SCHEDULER if p.name.endswith("_internal_state"))
_SHARED_NAMES = (
    "read_internal_state", "internal_state_answer", "metrics_collector",
    "draft_input", "draft_kv_projection", "unquantized_linear", "mha_pool",
    "hybrid_request_pool",
    "moe_backend_context", "moe_a2a_context", "attention_backend", "graph_capture",
    "generated_sizes",
)  # fmt: skip
CALLED = (*_CALLED, *(p for p in contracts.CALLED if p.name in _SHARED_NAMES))

# What tells the last release of this worker from the two before it.
_EXTEND_INPUT = TouchPoint(
    "extend_input", _EAGLE_INFO, "EagleDraftExtendInput", "class", None,
    "scheduler", "what a draft extend reads", hooked=False,
)  # fmt: skip
_VERIFIED_ID = TouchPoint(
    "verified_id", _EAGLE_INFO, "EagleVerifyOutput.verified_id", "attribute", None,
    "scheduler", "the tokens of a verify, which a draft extend reads of the draft's own input",
    hooked=False,
)  # fmt: skip
LAST_CALLED = (*CALLED, _EXTEND_INPUT)
EARLY_CALLED = (*CALLED, _VERIFIED_ID)

LAUNCHER = contracts.LAUNCHER
SCHEDULER = (*_SCHEDULER_HOOKS, *_CONTROL, _INIT_INFO, *_METRICS)
EARLY_SCHEDULER = (*SCHEDULER, _DRAFT_POSITIONS)

FIRST_LAUNCHER = (
    LAUNCH_FUNCTION,
    *(point for point in LAUNCHER if point.name != "launch_subprocesses"),
)
FIRST_SCHEDULER = (*_SCHEDULER_HOOKS, *_CONTROL, *_FIRST_SCHEDULER_HOOKS)
