"""What the scheduler makes of a step's tokens."""

WHAT = "the scheduler takes the result of a target-only step for what it is"
WHY = (
    "On the spec-v1 worker a verify has committed its tokens already, and a target-only step has"
    " not. On spec-v2 every step counts as a verify of each request, and a target-only one is none."
)
UPSTREAM = "none"
RETIRE = "together with server_args"

SEAMS = ("process_decode", "resolve_spec_tokens")
