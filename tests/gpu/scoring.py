"""A program: a plain engine writes texts, reads them and others, and says how good it finds each.

    python scoring.py PLAN.json  # as for swinging_load, and "texts": [[prompt ids, output ids]]

Its last line lists, for each output token of its "own" and of the "given" texts, by how much its
log probability falls short of that of the best token in its place, and for each place in its own
texts by how much that of the "second" best does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from swinging_load import Load, arguments


def shortfalls(
    engine: Any, texts: list[tuple[list[int], list[int]]]
) -> tuple[list[float], list[float]]:
    """Of each output token of all texts, and of the second best in its place, in nats."""
    answers = engine.generate(
        input_ids=[prompt + output for prompt, output in texts],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    found, seconds = [], []
    for (prompt, _), answer in zip(texts, answers, strict=True):
        chosen, best = (answer["meta_info"][f"input_{kind}_logprobs"] for kind in ("token", "top"))
        outputs = slice(len(prompt), None)
        for (of_chosen, *_), ((of_best, *_), (of_second, *_)) in zip(
            chosen[outputs], best[outputs], strict=True
        ):
            found.append(of_best - of_chosen)
            seconds.append(of_best - of_second)
    return found, seconds


def main() -> None:
    import sglang

    plan = json.loads(Path(sys.argv[1]).read_text())
    engine = sglang.Engine(**arguments(plan["engine"]))
    try:
        load = Load(engine, plan["tokens"], plan["burst"])
        answers = [answer for number in range(plan["rounds"]) for answer in load.round(number)]
        own, second = shortfalls(engine, [(one["prompt"], one["output"]) for one in answers])
        given, _ = shortfalls(engine, plan["texts"])
        read = {"own": own, "given": given, "second": second}
        print("\nRESULT", json.dumps(read), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
