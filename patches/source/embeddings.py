"""Images and audio, for the draft."""

WHAT = "an EAGLE-3 draft sees of an image or audio what its target sees"
WHY = (
    "The spec-v1 worker hands the target's embeddings to the draft, which does not look at them"
    " (0.5.9) or takes each of them for its neighbour's, so drafts after an image are rejected."
)
UPSTREAM = "none"
RETIRE = "together with server_args"

SEAMS = ("target_embeds", "draft_embeds")
