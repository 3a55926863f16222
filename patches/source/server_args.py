"""The command line and what SGLang makes of it."""

WHAT = "ServerArgs hands its parsing, its check and its admission cap to sglang_spec_ext"
WHY = (
    "Without the entry point and the .pth nothing adds --speculative-disable-batch-threshold to the"
    " command line, refuses what cannot go with it, or keeps SGLang's cap of 48 running requests"
    " under speculation from hiding it. A server without one of our flags and without a draft goes"
    " through these seams as if they were not there."
)
UPSTREAM = "none"
RETIRE = "when the plugin may be loaded by its entry point, or SGLang has such a threshold itself"

SEAMS = ("add_cli_args", "from_cli_args", "check_server_args", "admission_cap")
