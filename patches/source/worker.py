"""The one seam on the way of every decode step."""

WHAT = "the speculative worker asks sglang_spec_ext before each decode step"
WHY = (
    "This is where the mode is decided: a step either speculates as SGLang does, or decodes one"
    " token per request with the target alone and keeps the draft's KV cache warm."
)
UPSTREAM = "none"
RETIRE = "together with server_args"

SEAMS = ("forward_batch_generation", "forward_batch_generation_v1")
