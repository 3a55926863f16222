"""Figures."""

WHAT = "accept length in logs, metrics and answers counts verifies only"
WHY = (
    "SGLang divides all tokens by all steps; with target-only steps among them the accept length"
    " falls towards 1, as if the draft were bad."
)
UPSTREAM = "none"
RETIRE = "together with server_args"

SEAMS = ("update_spec_metrics", "report_decode_stats", "request_spec_metrics")
