"""Plain PyTorch bodies of the CPU ops that SGLang looks up in ``torch.ops.sgl_kernel``.

Slow and simple on purpose: they are checked against SGLang's own Triton kernels where those exist
and against independent loops otherwise (tests/engine/test_stand_ins.py). Arguments that the tiny
models never use are refused by name, so that a stand-in cannot be silently wrong.
"""

from __future__ import annotations

import torch

from . import attention, cache_locations, draft_tree

STAND_INS = {
    kernel.__name__: kernel
    for kernel in (
        attention.extend_attention_cpu,
        attention.decode_attention_cpu,
        attention.build_draft_decode_metadata_cpu,
        cache_locations.assign_req_to_token_pool_cpu,
        cache_locations.assign_extend_cache_locs_cpu,
        cache_locations.assign_draft_cache_locs_contiguous_cpu,
        cache_locations.fill_bonus_tokens_cpu,
        cache_locations.fill_accept_out_cache_loc_cpu,
        cache_locations.copy_all_layer_kv_cache_cpu,
        draft_tree.build_tree_kernel_efficient_cpu,
        draft_tree.verify_tree_greedy_cpu,
    )
}


def register() -> None:
    for name, kernel in STAND_INS.items():
        setattr(torch.ops.sgl_kernel, name, kernel)
