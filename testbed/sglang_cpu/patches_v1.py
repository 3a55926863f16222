"""What the releases with the spec-v1 worker need changed to run on such a machine, by module.

They have no speculation on CPU at all. Their Triton kernels run under Triton's interpreter, which
the environment of `engine` turns on; what is left are CUDA kernels and the attention backends.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .import_hooks import Patch
from .patches import replace, use_stand_in_kernels

RELEASES = ("0.5.9", "0.5.10.post1", "0.5.11", "0.5.12.post1")


def _use_tree_kernels(eagle_utils: ModuleType) -> None:
    """The draft's tree is built and followed by CUDA kernels only."""
    from .kernels import draft_tree

    def build(parent_list: Any, *args: Any) -> None:
        # with a single draft step nothing has a parent, and SGLang makes that list of floats
        draft_tree.build_tree_kernel_efficient_cpu(parent_list.long(), *args)

    def verify(
        predicts: Any, accept_index: Any, accept_token_num: Any, topk: int = -1, **tree: Any
    ) -> tuple[Any, Any, Any]:
        # releases spell it retrive or retrieve, the kernel always the former
        tree = {name.replace("retrieve", "retrive"): value for name, value in tree.items()}
        draft_tree.verify_tree_greedy_cpu(predicts, accept_index, accept_token_num, **tree)
        return predicts, accept_index, accept_token_num

    eagle_utils.sgl_build_tree_kernel_efficient = build  # imported there only with CUDA
    replace(eagle_utils, "verify_tree_greedy_func", verify)


def _use_tree_attention(attention_registry: ModuleType) -> None:
    def create(runner: Any) -> Any:
        from .tree_attention import TreeAttentionBackend

        return TreeAttentionBackend(runner)

    backends = attention_registry.ATTENTION_BACKENDS
    assert "torch_native" in backends
    backends["torch_native"] = create


def _use_branch_attention(draft_utils: ModuleType) -> None:
    factory = draft_utils.DraftBackendFactory

    def create_decode_backend(self: Any) -> Any:
        from .tree_attention import BranchAttentionBackends

        return BranchAttentionBackends(
            self.draft_model_runner, self.topk, self.speculative_num_steps
        )

    def create_draft_extend_backend(self: Any) -> Any:
        from .tree_attention import TreeAttentionBackend

        return TreeAttentionBackend(self.draft_model_runner)

    replace(factory, "create_decode_backend", create_decode_backend)
    replace(factory, "create_draft_extend_backend", create_draft_extend_backend)


def _synchronize_nothing(llama: ModuleType) -> None:
    """The draft waits for the GPU when it takes over the target's embedding."""
    replace(llama.torch.cuda, "synchronize", lambda *_, **__: None)


def _record_no_stream(overlap_utils: ModuleType) -> None:
    """The overlap schedule tells the allocator of GPU memory which streams use a tensor."""
    replace(overlap_utils.torch.Tensor, "record_stream", lambda *_: None)


def _find_slots(eagle_info_v2: ModuleType) -> None:
    """A verify of the spec-v2 worker looks up its KV slots on known devices only, by a kernel that
    Triton's interpreter runs as well."""
    replace(eagle_info_v2, "_is_cuda", True)


def _mask_on_cpu(xgrammar_backend: ModuleType) -> None:
    """Its way to apply a grammar's mask to logits on a CPU asks for a kernel that no wheel has."""

    def apply_vocab_mask(self: Any, logits: Any, vocab_mask: Any) -> None:
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(logits, vocab_mask)

    replace(xgrammar_backend.XGrammarGrammar, "apply_vocab_mask", apply_vocab_mask)


PATCHES: dict[str, Patch] = {
    "sgl_kernel.load_utils": use_stand_in_kernels,
    "sglang.srt.speculative.eagle_utils": _use_tree_kernels,
    "sglang.srt.layers.attention.attention_registry": _use_tree_attention,
    "sglang.srt.speculative.draft_utils": _use_branch_attention,
    "sglang.srt.models.llama": _synchronize_nothing,
    "sglang.srt.constrained.xgrammar_backend": _mask_on_cpu,
    "sglang.srt.managers.overlap_utils": _record_no_stream,
    "sglang.srt.speculative.eagle_info_v2": _find_slots,
}
