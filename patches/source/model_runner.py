"""Models and graphs."""

WHAT = "the model runner loads targets and captures graphs with sglang_spec_ext"
WHY = (
    "An EAGLE-3 target whose class lacks the hooks that SGLang calls gets them when it is loaded."
    " Verify and draft graphs above the threshold can never run, so they are not captured. Before"
    " 0.5.13 the graph runner resets the layers that the draft was trained on."
)
UPSTREAM = "none"
RETIRE = "together with server_args"

SEAMS = ("load_model", "initialize_model", "device_graphs", "graph_sizes")
