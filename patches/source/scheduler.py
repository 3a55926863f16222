"""The scheduler's handshake, and control requests to it."""

WHAT = "the scheduler confirms to its launcher what took effect, and answers for our settings"
WHY = (
    "The launcher waits for that confirmation. /server_info shows the mode and its counts, and"
    " /set_internal_state changes the threshold of a running server, or says why it does not."
)
UPSTREAM = "none"
RETIRE = "together with server_args"

SEAMS = (
    "init_info",
    "init_model_worker",
    "scheduler_process",
    "get_internal_state",
    "set_internal_state",
    "relay_update",
)
