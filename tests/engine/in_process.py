"""One real scheduler in this process, without its sockets, in the newest release and in the first.

Imports SGLang in its functions only, since whoever forks wants it imported first.
"""

from __future__ import annotations

from array import array
from typing import Any

from testbed import engine


def scheduler_of(arguments: dict[str, Any]) -> Any:
    """A scheduler for these keyword arguments of ``sglang.Engine``, models loaded."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    record = ServerArgs(**arguments)
    if engine.FIRST_RELEASE:
        record.check_server_args()
        ranks = ("tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank")
        alone: dict[str, Any] = dict.fromkeys(ranks, 0)
        return Scheduler(record, PortArgs.init_new(record), gpu_id=0, dp_rank=None, **alone)

    from sglang.srt.managers.scheduler import configure_scheduler_process
    from sglang.srt.runtime_context import SpawnRanks, publish

    record.resolve_once()
    record.check_server_args()
    ports = PortArgs.init_new(record)
    publish(record, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    configure_scheduler_process(record, 0)
    return Scheduler(record, ports)


def draft_runner(scheduler: Any) -> Any:
    worker = scheduler.draft_worker
    return worker.model_runner if engine.FIRST_RELEASE else worker.draft_worker.draft_runner


def request(rid: str, ids: list[int], sampling: Any, media: dict[str, Any] | None) -> Any:
    """A request as the tokenizer process sends it.

    media: what it made of images or audio, by the names of SGLang's fields.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    fields: dict[str, Any] = {
        "rid": rid,
        "input_text": None,
        "input_ids": ids,
        "input_embeds": None,
        "mm_inputs": media,
        "sampling_params": sampling,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    if not engine.FIRST_RELEASE:
        fields |= {"input_ids": array("q", ids), "token_type_ids": None}
        if media is not None:
            from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

            fields["mm_inputs"] = MultimodalProcessorOutput(**media)
    return TokenizedGenerateReqInput(**fields)


def step(scheduler: Any) -> None:
    """One round of the scheduler's loop."""
    import torch

    if engine.FIRST_RELEASE:
        batch = scheduler.get_next_batch_to_run()
    else:
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
    if batch:
        with torch.no_grad():  # as in SGLang's own loops
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    scheduler.last_batch = batch


def accepted_drafts(request: Any) -> int:
    field = "spec_accepted_tokens" if engine.FIRST_RELEASE else "spec_num_correct_drafts"
    accepted: int = getattr(request, field)
    return accepted
