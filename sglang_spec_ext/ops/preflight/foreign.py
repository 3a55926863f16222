"""Names from other engines and old releases, and what SGLang calls them. None: nothing does it."""

from __future__ import annotations

FOREIGN_FLAGS: dict[str, str | None] = {
    # vLLM
    "--num-speculative-tokens": "--speculative-num-draft-tokens",
    "--speculative-model": "--speculative-draft-model-path",
    "--speculative-disable-by-batch-size": "--speculative-disable-batch-threshold",
    "--disable-by-batch-size": "--speculative-disable-batch-threshold",
    "--speculative-draft-tensor-parallel-size": None,
    "--ngram-prompt-lookup-max": "--speculative-ngram-max-trie-depth",
    "--ngram-prompt-lookup-min": None,
    "--spec-decoding-acceptance-method": None,
    "--use-v2-block-manager": None,
    "--tensor-parallel-size": "--tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--data-parallel-size": "--dp-size",
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--enforce-eager": "--disable-cuda-graph",
    "--block-size": "--page-size",
    "--enable-prefix-caching": None,
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--enable-chunked-prefill": None,
    "--tokenizer": "--tokenizer-path",
    "--swap-space": None,
    "--max-seq-len-to-capture": "--cuda-graph-max-bs",
    "--enable-reasoning": "--reasoning-parser",
    "--enable-auto-tool-choice": "--tool-call-parser",
    "--disable-log-requests": None,
    "--seed": "--random-seed",
    # early SGLang and hand-written notes
    "--draft-model-path": "--speculative-draft-model-path",
    "--draft-model": "--speculative-draft-model-path",
    "--num-speculative-steps": "--speculative-num-steps",
    "--num-draft-tokens": "--speculative-num-draft-tokens",
    "--eagle-topk": "--speculative-eagle-topk",
    "--speculative-topk": "--speculative-eagle-topk",
    "--speculative-num-tokens": "--speculative-num-draft-tokens",
    "--max-context-length": "--context-length",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
}

# A value that another engine writes as JSON into one flag.
SPECULATIVE_CONFIG = "--speculative-config"
