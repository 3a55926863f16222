"""A deliberate fault for test_models.py: the draft's KV of a prompt is worthless.

On PYTHONPATH behind the test bed's own sitecustomize, which runs this one too.
"""

import sys
from types import ModuleType
from typing import Any

from sglang_cpu.import_hooks import PatchingFinder


def _forget_prompt(llama_eagle3: ModuleType) -> None:
    forward = llama_eagle3.LlamaModel.forward

    def forward_without_memory(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if forward_batch.forward_mode.name == "EXTEND":
            # All but the last row of the only request: that one makes the first draft.
            hidden_states = forward_batch.spec_info.hidden_states.clone()
            hidden_states[:-1] = 0
            forward_batch.spec_info.hidden_states = hidden_states
            input_ids = input_ids.clone()
            input_ids[:-1] = 0
        return forward(self, input_ids, positions, forward_batch, *args, **kwargs)

    llama_eagle3.LlamaModel.forward = forward_without_memory


sys.meta_path.insert(0, PatchingFinder({"sglang.srt.models.llama_eagle3": _forget_prompt}))
