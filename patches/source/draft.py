"""What the draft is given."""

WHAT = "an EAGLE-3 draft gets the embeddings and positions that it was trained on"
WHY = (
    "The spec-v1 worker hands the draft embeddings of an image or audio that are one token off, and"
    " on a GPU overwritten by then; the draft of 0.5.9 looks at none. Up to 0.5.11 it starts the"
    " draft's decode steps one position too far on. Nothing fails, but drafts are rejected."
)
UPSTREAM = "none"
RETIRE = "together with server_args; the newest release that needs it is 0.5.12.post1"

SEAMS = ("target_embeds", "draft_embeds", "draft_positions")
