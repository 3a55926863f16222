"""sgl.Engine and the launch of the processes."""

WHAT = "Engine hands its keyword arguments and the launch of its processes to sglang_spec_ext"
WHY = (
    "Engine(speculative_disable_batch_threshold=N) must not reach ServerArgs, which knows no such"
    " argument. The spawned scheduler processes learn the settings from the launcher, which stops"
    " the server unless each of them has confirmed that they took effect."
)
UPSTREAM = "none"
RETIRE = "together with server_args"

SEAMS = ("server_args_class", "launch_subprocesses", "launch_subprocesses_function")
