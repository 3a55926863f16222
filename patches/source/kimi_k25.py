"""EAGLE-3 hooks on Kimi-K2.5's multimodal wrapper, which SGLang 0.5.9 lacks."""

WHAT = "Kimi-K2.5 accepts an EAGLE-3 draft: the wrapper class hands the hooks to its text model"
WHY = (
    "KimiK25ForConditionalGeneration has none of the methods that the model runner and the EAGLE"
    " worker call on a target, so a server with an EAGLE-3 draft dies with an AttributeError after"
    " minutes of loading weights. The text model (DeepseekV3ForCausalLM) has them all, and"
    " forward() already runs that text model with its logits processor, so delegating is enough."
    " Stands alone: needs no other diff and no package beside SGLang."
)
UPSTREAM = "https://github.com/sgl-project/sglang/pull/19689 (in 0.5.10)"
RETIRE = "when SGLang 0.5.9 is no longer served; later releases have the methods themselves"

HOOKS = """\

    # EAGLE-3: the draft reads hidden states, embedding and head of the text model.
    def set_eagle3_layers_to_capture(
        self, layer_ids: Optional[List[int]] = None
    ) -> None:
        self.language_model.set_eagle3_layers_to_capture(layer_ids)

    def get_embed_and_head(self) -> Tuple[torch.Tensor, torch.Tensor]:
        return self.language_model.get_embed_and_head()

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        self.language_model.set_embed_and_head(embed, head)
"""

EDITS = {
    "0.5.9": [
        {
            "file": "sglang/srt/models/kimi_k25.py",
            "anchor": (
                "        if language_weights:\n"
                "            self.language_model.load_weights(language_weights)\n"
            ),
            "insert_after": HOOKS,
        },
    ],
}
