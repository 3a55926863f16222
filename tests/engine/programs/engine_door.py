"""``sgl.Engine`` with our keyword arguments: prints one JSON object about what it did."""

from __future__ import annotations

import json

import sglang as sgl

from testbed import engine, prompts

TOKENS = 40


def refusal() -> str:
    try:
        sgl.Engine(**engine.server_args(1, speculative_disable_batch_threshold="many"))
    except ValueError as error:
        return str(error)
    return "nothing"


def main() -> None:
    refused = refusal()
    arguments = engine.server_args(
        1, speculative_disable_batch_threshold=0, max_running_requests=None
    )
    llm = sgl.Engine(**arguments)
    starts = [prompts.prompt_ids(seed) for seed in (700, 701)]
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers = llm.generate(input_ids=starts, sampling_params=sampling)
    (state,) = llm.get_server_info()["internal_states"]
    llm.shutdown()
    print(
        json.dumps(
            {
                "refused": refused,
                "right": [
                    answer["output_ids"] == prompts.continue_ids(start, TOKENS)
                    for start, answer in zip(starts, answers, strict=True)
                ],
                "verifies": [a["meta_info"].get("spec_verify_ct", 0) for a in answers],
                "max_running_requests": state["effective_max_running_requests_per_dp"],
            }
        )
    )


if __name__ == "__main__":  # SGLang spawns
    main()
