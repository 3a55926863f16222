"""A program: boots one engine on a GPU and swings its load across N; the test reads its last line.

    python swinging_load.py PLAN.json  # {"engine": {...}, "rounds": 9, "tokens": 300, "burst": 12}

In each round two long requests run all the time, and twice a burst comes and goes beside them: so
the running batch rises over N and falls below it twice with requests in flight.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pynvml

from testbed import prompts

WARM_UP_ROUNDS = 4
"""Until then allocators grow, and kernels load."""

RENAMED = {"cuda_graph_max_bs_decode": "cuda_graph_max_bs"}
PREFILL_GRAPHS_OFF = ("disable_prefill_cuda_graph", "disable_piecewise_cuda_graph")

BURST_TOKENS = 24
BURSTS_AT = (0.2, 0.6)
"""Share of the long requests' tokens after which a burst comes."""


def memory_in_use() -> int:
    """Bytes of GPU memory that this engine's processes hold."""
    pynvml.nvmlInit()
    ours = {child.pid for child in psutil.Process().children(recursive=True)}
    devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    running = [p for d in devices for p in pynvml.nvmlDeviceGetComputeRunningProcesses(d)]
    return sum(process.usedGpuMemory for process in running if process.pid in ours)


class Load:
    def __init__(self, engine: Any, tokens: int, burst: int) -> None:
        self._engine, self._tokens, self._burst = engine, tokens, burst

    def round(self, number: int) -> list[dict[str, Any]]:
        """Answers of round ``number``, the long requests first."""
        return self._engine.loop.run_until_complete(self._round(number))  # type: ignore[no-any-return]

    async def _round(self, number: int) -> list[dict[str, Any]]:
        seed, progress = 1000 * number, asyncio.Queue[int]()
        long = [asyncio.create_task(self._one(seed + i, self._tokens, progress)) for i in (0, 1)]
        bursts = []
        for share in BURSTS_AT:
            while await progress.get() < share * self._tokens:
                pass
            seed += 100
            lengths = (BURST_TOKENS + 5 * (place % 4) for place in range(self._burst))
            bursts += [asyncio.create_task(self._one(seed + i, n)) for i, n in enumerate(lengths)]
        return list(await asyncio.gather(*long, *bursts))

    async def _one(
        self, seed: int, tokens: int, progress: asyncio.Queue[int] | None = None
    ) -> dict[str, Any]:
        ids = prompts.prompt_ids(seed)
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        output: list[int] = []
        chunks = await self._engine.async_generate(
            input_ids=ids, sampling_params=sampling, stream=True
        )
        async for chunk in chunks:
            done, new = chunk["meta_info"]["completion_tokens"], chunk["output_ids"]
            output = new if len(new) == done else output + new  # releases differ
            if progress is not None:
                progress.put_nowait(done)
        meta = chunk["meta_info"]
        return {
            "prompt": ids,
            "output": output,
            "verifies": meta.get("spec_verify_ct", 0),
            "accept_length": meta.get("spec_accept_length"),
        }


def arguments(wanted: dict[str, Any]) -> dict[str, Any]:
    """``wanted`` as this release names it; graphs for prefill are off, they are not our matter."""
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    named = {name if name in known else RENAMED.get(name, name): wanted[name] for name in wanted}
    return {**named, **{name: True for name in PREFILL_GRAPHS_OFF if name in known}}


def main() -> None:
    import sglang

    plan = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(**arguments(plan["engine"]))
    try:
        load = Load(engine, plan["tokens"], plan["burst"])
        rounds, memory = [], []
        for number in range(plan["rounds"]):
            rounds.append(load.round(number))
            memory.append(memory_in_use())
        state = engine.get_server_info()["internal_states"][0]
        print("\nRESULT", json.dumps({
            "rounds": rounds,
            "memory_growth": max(memory) - memory[min(WARM_UP_ROUNDS, len(memory)) - 1],
            "accept_length": state.get("avg_spec_accept_length"),
            "plugin": state.get("sglang_spec_ext"),
        }), flush=True)  # fmt: skip
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
