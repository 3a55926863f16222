"""A program: boots one engine on a GPU and swings its load across N; the test reads its last line.

    python swinging_load.py '{"engine": {...}, "rounds": 50, "tokens": 300, "burst": 12}'

In each round two long requests run all the time, and two bursts come and go beside them: so the
running batch rises over N and falls below it twice with requests in flight. Round 0 is repeated at
the end, for memory and outputs must not depend on what went before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

from testbed import prompts

WARM_UP_ROUNDS = 4
"""Until then allocators grow, and kernels load."""

RENAMED = {"cuda_graph_max_bs_decode": "cuda_graph_max_bs"}
PREFILL_GRAPHS_OFF = ("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")

BURST_TOKENS = 24
GAP_S = 0.01


def memory_in_use() -> int:
    """Bytes of all GPUs in use, by whomever."""
    import torch

    devices = range(torch.cuda.device_count())
    pairs = [torch.cuda.mem_get_info(device) for device in devices]
    return sum(total - free for free, total in pairs)


class Load:
    def __init__(self, engine: Any, tokens: int, burst: int, context: int) -> None:
        self._engine, self._tokens, self._burst, self._context = engine, tokens, burst, context

    def round(self, number: int) -> list[dict[str, Any]]:
        return self._engine.loop.run_until_complete(self._round(number))  # type: ignore[no-any-return]

    async def _round(self, number: int) -> list[dict[str, Any]]:
        seed = 1000 * number
        long = [self._one(seed + place, self._tokens, 0) for place in range(2)]
        burst = [
            self._one(seed + 100 * wave + place, BURST_TOKENS + 5 * (place % 4), wave_s)
            for wave, wave_s in ((1, 0.03), (2, 0.35))
            for place in range(self._burst)
        ]
        return list(await asyncio.gather(*long, *burst))

    async def _one(self, seed: int, tokens: int, delay_s: float) -> dict[str, Any]:
        await asyncio.sleep(delay_s + GAP_S * (seed % 100))
        ids = prompts.prompt_ids(seed, self._context)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answer = await self._engine.async_generate(input_ids=ids, sampling_params=sampling)
        return {
            "prompt": ids,
            "output": answer["output_ids"],
            "verifies": answer["meta_info"].get("spec_verify_ct", 0),
            "accept_length": answer["meta_info"].get("spec_accept_length"),
        }


def arguments(wanted: dict[str, Any]) -> dict[str, Any]:
    """``wanted`` as this release names it; graphs for prefill are off, they are not our matter."""
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in dataclasses.fields(ServerArgs)}
    named = {name if name in known else RENAMED.get(name, name): wanted[name] for name in wanted}
    return {**named, **{name: True for name in PREFILL_GRAPHS_OFF if name in known}}


def main() -> None:
    import sglang

    plan = json.loads(sys.argv[1])
    engine = sglang.Engine(**arguments(plan["engine"]))
    try:
        load = Load(engine, plan["tokens"], plan["burst"], plan.get("context", prompts.ORDER))
        rounds, memory = [], []
        for number in (*range(plan["rounds"]), 0):
            rounds.append(load.round(number))
            memory.append(memory_in_use())
        state = engine.get_server_info()["internal_states"][0]
        print("\nRESULT", json.dumps({
            "rounds": rounds,
            "memory_growth": max(memory[WARM_UP_ROUNDS:]) - memory[WARM_UP_ROUNDS - 1],
            "accept_length": state.get("avg_spec_accept_length"),
            "plugin": state.get("sglang_spec_ext"),
        }), flush=True)  # fmt: skip
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
