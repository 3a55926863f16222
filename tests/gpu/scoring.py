"""A program: a plain engine writes texts, reads them and others, and says how good it finds each.

    python scoring.py PLAN.json  # as for swinging_load, and "texts": [[prompt ids, output ids]]

Its last line lists, for each output token of its "own" and of the "given" texts, by how much its
log probability falls short of that of the best token in its place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swinging_load import Load, arguments


def shortfalls(engine: Any, texts: list[tuple[list[int], list[int]]]) -> list[float]:
    """Of each output token of all texts, in nats; 0 for a best one."""
    answers = engine.generate(
        input_ids=[prompt + output for prompt, output in texts],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
    )
    found = []
    for (prompt, _), answer in zip(texts, answers, strict=True):
        chosen, best = (answer["meta_info"][f"input_{kind}_logprobs"] for kind in ("token", "top"))
        outputs = slice(len(prompt), None)
        pairs = zip(chosen[outputs], best[outputs], strict=True)
        found += [of_best[0] - of_chosen[0] for of_chosen, (of_best, *_) in pairs]
    return found


def main() -> None:
    import sglang

    plan = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(**arguments(plan["engine"]))
    try:
        load = Load(engine, plan["tokens"], plan["burst"])
        answers = [answer for number in range(plan["rounds"]) for answer in load.round(number)]
        texts = {"own": [(one["prompt"], one["output"]) for one in answers], "given": plan["texts"]}
        read = {whose: shortfalls(engine, pairs) for whose, pairs in texts.items()}
        print("\nRESULT", json.dumps(read), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
