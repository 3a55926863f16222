"""What the engine tests see of the scheduler process, and the faults that they put into it.

On PYTHONPATH behind the test bed's own sitecustomize, which runs this one too. It watches always:
one "spec-ext probe:" log line per forward of the draft and per verify, and the state of the pools
in /server_info. Faults come in two ways:

- SPEC_EXT_TEST_FAULT names one that is there from the start (`AT_IMPORT`);
- a file in the folder SPEC_EXT_TEST_FAULTS turns on the one of its name, while the file is there.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import logging
import multiprocessing
import os
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_cpu.import_hooks import PatchingFinder, put_first

from sglang_spec_ext.compat import workers
from sglang_spec_ext.compat.contracts import TouchPoint

logger = logging.getLogger("spec_ext_probe")
SWITCHBOARD = os.environ.get("SPEC_EXT_TEST_FAULTS", "")


def is_on(fault: str) -> bool:
    return bool(SWITCHBOARD) and Path(SWITCHBOARD, fault).exists()


def say(message: str) -> None:
    logger.info("spec-ext probe: %s", message)


# ------------------------------------------------------------------------------ always on
def watch_draft_forwards(llama_eagle3: ModuleType) -> None:
    cls = llama_eagle3.LlamaForCausalLMEagle3
    forward = cls.forward

    def forward_and_say(
        self: Any, input_ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        say(f"draft forward {batch.forward_mode.name}")
        return forward(self, input_ids, positions, batch, *args, **kwargs)

    cls.forward = forward_and_say


def watch_verifies(eagle_worker_v2: ModuleType) -> None:
    # The innermost layer: a plugin's hook goes around it, so target-only steps do not come here.
    cls = eagle_worker_v2.EAGLEWorkerV2
    verify = cls.verify

    def verify_and_say(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        starts = batch.seq_lens.tolist()
        result = verify(self, batch, *args, **kwargs)
        for req, start, length in zip(batch.reqs, starts, result.accept_lens.tolist(), strict=True):
            say(f"verify rid={req.rid} position={start} accepted={length}")
        return result

    cls.verify = verify_and_say


def watch_v1_verifies(eagle_worker: ModuleType) -> None:
    cls = eagle_worker.EAGLEWorker
    verify = cls.verify

    def verify_and_say(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        starts, reqs = batch.seq_lens.tolist(), batch.reqs
        result = verify(self, batch, *args, **kwargs)
        for req, start, drafts in zip(reqs, starts, accepted_drafts(result[1]), strict=True):
            say(f"verify rid={req.rid} position={start} accepted={drafts + 1}")
        return result

    cls.verify = verify_and_say


def accepted_drafts(verified: Any) -> list[int]:
    names = ("num_correct_drafts", "num_accepted_drafts", "accept_length")  # newest first
    fields = (f"{name}_per_req_cpu" for name in names)
    accepted: list[int] = getattr(verified, next(f for f in fields if hasattr(verified, f)))
    return accepted


def report_state(internal_state: ModuleType) -> None:
    cls = internal_state.SchedulerInternalStateController
    add_env_vars = cls._add_env_vars

    def add_probe(self: Any, state: dict[str, Any]) -> None:
        add_env_vars(self, state)
        state["probe"] = _state_of(self.scheduler)

    cls._add_env_vars = add_probe


def report_schedulers_state(scheduler: ModuleType) -> None:
    if hasattr(scheduler, "SchedulerInternalStateController"):
        return  # reports it
    cls = scheduler.Scheduler
    get_internal_state = cls.get_internal_state

    def add_probe(self: Any, request: Any) -> Any:
        output = get_internal_state(self, request)
        # the original hands out the live attributes of its server arguments
        output.internal_state = {**output.internal_state, "probe": _state_of(self)}
        return output

    cls.get_internal_state = add_probe


def _state_of(scheduler: Any) -> dict[str, Any]:
    state = {
        "kv_slots_free": scheduler.token_to_kv_pool_allocator.available_size(),
        "kv_slots_cached": scheduler.tree_cache.evictable_size(),
        "request_rows_free": len(scheduler.req_to_token_pool.free_slots),
        "request_rows": scheduler.req_to_token_pool.size,
        "replaced": [name for name, function in imported.items() if _raw(name) is not function],
        "plugin": _plugin_state(),
    }
    say(f"state {json.dumps(state)}")  # of another rank than the first nothing else gets out
    return state


def _plugin_state() -> dict[str, Any] | None:
    from sglang_spec_ext.wiring import scheduler

    plugin = scheduler._runtime_state
    return None if plugin is None else plugin.describe()


imported: dict[str, Any] = {}
"""What each touch point was right after the import of its module, before any plugin came."""


def remember(points: list[TouchPoint]) -> None:
    imported.update({point.target: _raw(point.target) for point in points})


def _raw(target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return vars(pkgutil.resolve_name(owner)).get(name)


# ------------------------------------------------------------------ turned on by a file
def switch_draft_kv_faults(warm_draft: ModuleType) -> None:
    write, stepped = warm_draft.DraftKVWriter.write, warm_draft.WarmDraft.stepped
    prefilled = warm_draft.WarmDraft.prefilled

    def write_and_say(self: Any, tokens: Any, *args: Any) -> None:
        say(f"draft kv rows={len(tokens)}")
        write(self, tokens, *args)

    def stepped_unless_cold(
        self: Any, pool_indices: Any, tokens: Any, hidden: Any, positions: Any, slots: Any
    ) -> None:
        if is_on("cold_draft"):
            slots = slots * 0  # the sink of padded rows
        stepped(self, pool_indices, tokens, hidden, positions, slots)

    def prefilled_unless_lost(self: Any, pool_indices: Any, hidden: Any) -> None:
        if not is_on("lose_prefill"):
            prefilled(self, pool_indices, hidden)

    warm_draft.DraftKVWriter.write = write_and_say
    warm_draft.WarmDraft.stepped = stepped_unless_cold
    warm_draft.WarmDraft.prefilled = prefilled_unless_lost


def probe_resumes(cls: Any) -> None:
    """Say whom a resume has, and how far what it writes is from what their last positions held."""
    resume = cls._resume

    def resume_and_compare(self: Any, batch: Any) -> None:
        say(f"resume of {' '.join(request.rid for request in batch.reqs)}")
        if not is_on("compare_resume"):
            resume(self, batch)
            return
        self._warm_draft.catch_up()
        slots = self._reserved_slots(batch, batch.seq_lens - 1)
        difference = _difference(self, slots, lambda: resume(self, batch))
        say(f"resume kv difference={difference:.3e}")

    cls._resume = resume_and_compare


COMPARE_EVERY = 3
compared = itertools.cycle(range(COMPARE_EVERY))
"""The comparison has what waits written: on every step nothing would wait."""


def switch_step_faults(v2: ModuleType) -> None:
    cls = v2.TargetOnlyStep
    decode = cls._decode

    def decode_and_probe(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = decode(self, batch, *args, **kwargs)
        if is_on("leak"):
            # what a second allocation for slots that are reserved already would do
            self.worker.target_worker.model_runner.token_to_kv_pool_allocator.alloc(1)
        if is_on("compare_draft_kv") and next(compared) == 0:
            say(f"draft kv difference={_difference_to_own_extend(self, batch, result):.3e}")
        return result

    cls._decode = decode_and_probe
    probe_resumes(cls)


def _difference_to_own_extend(step: Any, batch: Any, result: Any) -> float:
    """Largest relative difference of the K/V just written and what SGLang's draft extend writes."""
    from sglang_spec_ext.compat import sglang_api  # needs torch

    slots = step._reserved_slots(batch, batch.seq_lens)
    size = batch.seq_lens.shape[0]
    tokens = sglang_api.bonus_tokens(result.next_draft_input)
    scratch = step._stubs.draft_input(size, tokens)
    hidden = step._warm_draft.last_hidden(batch.req_pool_indices)
    return _difference(step, slots, lambda: step._draft_extend(batch, 0, tokens, hidden, scratch))


def switch_v1_step_faults(v1: ModuleType) -> None:
    cls = v1.TargetOnlyStep
    decode, commit = cls._decode, v1.InFlight._commit

    def commit_and_say(self: Any, step: Any) -> None:
        commit(self, step)
        say("committed target-only step")

    def decode_and_probe(self: Any, batch: Any) -> Any:
        result = decode(self, batch)
        say("launched target-only step")
        if is_on("leak"):
            batch.token_to_kv_pool_allocator.alloc(1)
        if is_on("compare_draft_kv") and next(compared) == 0:
            tokens, draft_input = result.next_token_ids, batch.spec_info
            hidden = self._warm_draft.last_hidden(batch.req_pool_indices)
            difference = _difference(
                self, batch.out_cache_loc, lambda: self._draft_extend(batch, tokens, hidden)
            )
            batch.spec_info = draft_input
            say(f"draft kv difference={difference:.3e}")
        return result

    cls._decode, v1.InFlight._commit = decode_and_probe, commit_and_say
    probe_resumes(cls)


def _difference(step: Any, slots: Any, own_extend: Callable[[], None]) -> float:
    pool = step._draft.draft_runner.token_to_kv_pool
    buffers = [*pool.k_buffer, *pool.v_buffer]
    written = [buffer[slots].clone() for buffer in buffers]
    for buffer in buffers:
        buffer[slots] = 0  # an extend that writes elsewhere must not pass for equal
    own_extend()
    return max(
        float((buffer[slots] - kept).abs().max() / kept.abs().max())
        for buffer, kept in zip(buffers, written, strict=True)
    )


# ------------------------------------------------------------------- there from the start
LOST = {
    "spec-v2": next(p for p in workers.V2.scheduler if p.name == "update_spec_metrics"),
    "spec-v1": next(p for p in workers.FIRST_V1.scheduler if p.name == "report_decode_stats"),
}


def lose(point: TouchPoint) -> None:
    owner, _, name = point.target.rpartition(".")
    delattr(pkgutil.resolve_name(owner), name)


def lose_launch(engine: ModuleType) -> None:
    owner = engine if hasattr(engine, "_launch_subprocesses") else engine.Engine
    owner._launch_children = owner._launch_subprocesses
    del owner._launch_subprocesses


def hide_plugin() -> None:
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "Bootstrap"]
    entry_points = importlib.metadata.entry_points

    def without_ours(**selection: Any) -> Any:
        found = entry_points(**selection)
        if selection.get("group") == "sglang.srt.plugins":
            return type(found)(point for point in found if point.name != "spec_ext")
        return found

    importlib.metadata.entry_points = without_ours


def hide_from_second_rank(plugin: ModuleType) -> None:
    # SGLang spawns the ranks in their order; before that a process has no name yet
    if multiprocessing.current_process().name == "Process-2":
        plugin.register = lambda *_, **__: None


Patch = Callable[[ModuleType], None]
PROBES: dict[str, Patch] = {
    "sglang.srt.models.llama_eagle3": watch_draft_forwards,
    "sglang_spec_ext.target_only.warm_draft": switch_draft_kv_faults,
}
BY_WORKER: dict[str, dict[str, Patch]] = {
    "spec-v2": {
        "sglang.srt.speculative.eagle_worker_v2": watch_verifies,
        "sglang.srt.managers.scheduler_components.internal_state": report_state,
        "sglang.srt.managers.scheduler": report_schedulers_state,
        "sglang_spec_ext.target_only.v2": switch_step_faults,
    },
    "spec-v1": {
        "sglang.srt.speculative.eagle_worker": watch_v1_verifies,
        "sglang.srt.managers.scheduler": report_schedulers_state,
        "sglang_spec_ext.target_only.v1": switch_v1_step_faults,
    },
}


def install(fault: str) -> None:
    # The launcher has the arguments; the processes that it spawns have the work.
    spawned = multiprocessing.parent_process() is not None or "--multiprocessing-fork" in sys.argv
    patches: dict[str, list[Patch]] = defaultdict(list)
    contract = workers.contract()
    for module, patch in (PROBES | BY_WORKER[contract.worker]).items():
        patches[module].append(patch)
    if fault == "lost_in_scheduler" and spawned:
        lost = LOST[contract.worker]
        patches[lost.module].append(lambda _: lose(lost))
    elif fault == "lost_in_launcher" and not spawned:
        patches["sglang.srt.entrypoints.engine"].append(lose_launch)
    elif fault == "hidden_in_scheduler" and spawned:
        hide_plugin()
    elif fault == "hidden_in_second_rank" and spawned:
        patches["sglang_spec_ext.plugin"].append(hide_from_second_rank)
    points: dict[str, list[TouchPoint]] = defaultdict(list)
    for point in contract.scheduler:
        points[point.module].append(point)
    for module, here in points.items():
        patches[module].append(lambda _, here=here: remember(here))
    put_first(PatchingFinder({m: _all(steps) for m, steps in patches.items()}))


def _all(steps: list[Patch]) -> Patch:
    def apply(module: ModuleType) -> None:
        for step in steps:
            step(module)

    return apply


install(os.environ.get("SPEC_EXT_TEST_FAULT", ""))
