"""Compares the test bed's stand-in kernels with SGLang's own Triton kernels on random input.

A program, run by test_stand_ins.py in a process of its own, since it needs Triton's interpreter:
``python stand_in_cases.py RESULT`` writes JSON: by stand-in, then by case, the differences.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator

import sglang_cpu  # noqa: F401  (there because the test bed's sitecustomize ran)
import torch
from sglang_cpu.kernels import STAND_INS
from torch import Tensor

ROUNDS = 12
POOL_ROWS, POOL_WIDTH, SLOTS = 7, 96, 400
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32

Outcome = dict[str, Tensor]
Case = Callable[[random.Random], tuple[Outcome, Outcome]]
"""Runs stand-in and reference once on the same random input: (stand-in's results, reference's)."""

CASES: dict[str, dict[str, Case]] = {name: {} for name in STAND_INS}
"""By stand-in, by what is special about the case."""


def case(*arguments: object) -> Callable[[Callable[..., tuple[Outcome, Outcome]]], Callable]:
    """Register a function, named after its stand-in, as the case with these extra arguments."""

    def register(function: Callable[..., tuple[Outcome, Outcome]]) -> Callable:
        name = " ".join(map(str, arguments))
        CASES[function.__name__][name] = lambda rng: function(rng, *arguments)
        return function

    return register


# ------------------------------------------------------------------------------- random input
class Batch:
    """Requests with distinct rows of a slot table; every slot of the table is distinct."""

    def __init__(self, rng: random.Random, longest: int = 60) -> None:
        self.size = rng.randint(1, 5)
        self.rows = torch.tensor(rng.sample(range(POOL_ROWS), self.size))
        self.table = torch.randperm(POOL_ROWS * POOL_WIDTH, dtype=torch.int32)
        self.table = self.table.view(POOL_ROWS, POOL_WIDTH)
        self.lengths = torch.tensor([rng.randint(1, longest) for _ in range(self.size)])
        self.ends = self.lengths + torch.tensor([rng.randint(0, 33) for _ in range(self.size)])

    def slots(self, request: int, end: int) -> Tensor:
        return self.table[self.rows[request], :end]

    def random_buffers(self) -> tuple[Tensor, Tensor]:
        shape = (POOL_ROWS * POOL_WIDTH, KV_HEADS, HEAD_DIM)
        return torch.randn(shape), torch.randn(shape)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def cumulative(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32)


# ------------------------------------------------------------------------- slot bookkeeping
@case()
def assign_req_to_token_pool_cpu(rng: random.Random) -> tuple[Outcome, Outcome]:
    from sglang.srt.mem_cache.allocation import assign_req_to_token_pool

    batch = Batch(rng)
    new_slots = torch.randint(SLOTS, (int((batch.ends - batch.lengths).sum()),))
    arguments = (batch.lengths, batch.ends, new_slots, POOL_WIDTH)
    ours, theirs = batch.table.clone(), batch.table.clone()
    STAND_INS["assign_req_to_token_pool_cpu"](batch.rows, ours, *arguments)
    grid = (batch.size,)
    assign_req_to_token_pool[grid](batch.rows, theirs, *arguments, power_of_two(batch.size))
    return {"table": ours}, {"table": theirs}


@case()
def assign_extend_cache_locs_cpu(rng: random.Random) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs

    batch = Batch(rng)
    ours = torch.full((int((batch.ends - batch.lengths).sum()) + 3,), -7)
    theirs = ours.clone()
    arguments = (batch.rows, batch.table, batch.lengths, batch.ends)
    STAND_INS["assign_extend_cache_locs_cpu"](*arguments, ours, POOL_WIDTH)
    grid = (batch.size,)
    assign_extend_cache_locs[grid](*arguments, theirs, POOL_WIDTH, power_of_two(batch.size))
    return {"slots": ours}, {"slots": theirs}


@case(1, 3)
@case(4, 3)
@case(8, 4)
def assign_draft_cache_locs_contiguous_cpu(
    rng: random.Random, topk: int, steps: int
) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.speculative.cache_locs import assign_draft_cache_locs_contiguous

    batch = Batch(rng)
    ours = torch.full((batch.size * topk * steps,), -7)
    theirs = ours.clone()
    arguments = (batch.rows, batch.table, batch.lengths)
    STAND_INS["assign_draft_cache_locs_contiguous_cpu"](*arguments, ours, POOL_WIDTH, topk, steps)
    grid = (batch.size,)
    assign_draft_cache_locs_contiguous[grid](*arguments, theirs, POOL_WIDTH, topk, steps)
    return {"slots": ours}, {"slots": theirs}


@case()
def fill_bonus_tokens_cpu(rng: random.Random) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.speculative.eagle import fill_bonus_tokens

    size, stride = rng.randint(1, 6), rng.randint(1, 5)
    tokens = torch.randint(99, (size * stride,), dtype=torch.int32)
    lengths = torch.randint(1, stride + 1, (size,), dtype=torch.int32)
    ours = torch.full((size,), -7, dtype=torch.int32)
    theirs = ours.clone()
    STAND_INS["fill_bonus_tokens_cpu"](tokens, lengths, ours, stride)
    fill_bonus_tokens[(size,)](tokens, lengths, theirs, stride)
    return {"tokens": ours}, {"tokens": theirs}


@case()
def fill_accept_out_cache_loc_cpu(rng: random.Random) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.speculative.eagle import fill_accept_out_cache_loc

    size = rng.randint(1, 24)
    accepted = [place if rng.random() < 0.6 else -1 for place in rng.sample(range(size), size)]
    accept_index = torch.tensor(accepted, dtype=torch.int32)
    slots = torch.randperm(SLOTS)[:size]
    ours = torch.full((size,), -7)
    theirs = ours.clone()
    STAND_INS["fill_accept_out_cache_loc_cpu"](accept_index, slots, ours)
    fill_accept_out_cache_loc[(size,)](accept_index, slots, theirs, power_of_two(size))
    return {"slots": ours}, {"slots": theirs}


@case()
def copy_all_layer_kv_cache_cpu(rng: random.Random) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_tiled

    moved = rng.randint(1, 9)
    # Sources and targets overlap, as they do when accepted tokens move to the front.
    sources = torch.tensor(rng.sample(range(12), moved))
    targets = torch.tensor(rng.sample(range(12), moved))
    ours = [torch.randn(12, KV_HEADS, dim) for dim in (HEAD_DIM, HEAD_DIM, 24)]
    theirs = [buffer.clone() for buffer in ours]

    def addresses(buffers: list[Tensor]) -> tuple[Tensor, Tensor]:
        strides = [buffer[0].numel() * buffer.element_size() for buffer in buffers]
        pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
        return pointers, torch.tensor(strides)

    STAND_INS["copy_all_layer_kv_cache_cpu"](*addresses(ours), targets, sources)
    grid = (len(theirs), 3)
    copy_all_layer_kv_cache_tiled[grid](
        *addresses(theirs), targets, sources, moved, power_of_two(moved), BYTES_PER_TILE=128
    )
    return {f"buffer {i}": b for i, b in enumerate(ours)}, {
        f"buffer {i}": b for i, b in enumerate(theirs)
    }


# ---------------------------------------------------------------------------------- attention
@case(1, 3)
@case(4, 3)
def build_draft_decode_metadata_cpu(
    rng: random.Random, topk: int, steps: int
) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.speculative.cache_locs import generate_draft_decode_kv_indices

    batch = Batch(rng)
    table = STAND_INS["build_draft_decode_metadata_cpu"](
        batch.table, batch.rows, batch.lengths, topk, steps, POOL_WIDTH
    )
    branches = batch.size * topk
    indices = torch.zeros(steps, branches * POOL_WIDTH, dtype=torch.int64)
    indptr = torch.zeros(steps, branches + 1, dtype=torch.int32)
    generate_draft_decode_kv_indices[(steps, batch.size, topk)](
        batch.rows,
        batch.table,
        batch.lengths,
        indices,
        indptr,
        batch.lengths.repeat_interleave(topk),
        POOL_WIDTH,
        indices.shape[1],
        indptr.shape[1],
        power_of_two(batch.size),
        power_of_two(steps),
        power_of_two(branches),
        1,
    )
    ours, theirs = {}, {}
    for step in range(steps):
        for branch in range(branches):
            name = f"step {step} branch {branch}"
            length = int(batch.lengths[branch // topk]) + step + 1
            ours[name] = table[branch, :length].long()
            theirs[name] = indices[step, indptr[step, branch] : indptr[step, branch + 1]]
    return ours, theirs


@case()
def decode_attention_cpu(rng: random.Random) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    batch = Batch(rng)
    our_k, our_v = batch.random_buffers()
    their_k, their_v = our_k.clone(), our_v.clone()
    q = torch.randn(batch.size, HEADS, HEAD_DIM)
    k, v = torch.randn(2, batch.size, KV_HEADS, HEAD_DIM)
    slots = [batch.slots(i, n) for i, n in enumerate(batch.lengths.tolist())]
    new_slots = torch.stack([own[-1] for own in slots]).long()
    ours, theirs = torch.zeros_like(q), torch.zeros_like(q)
    scale, splits = HEAD_DIM**-0.5, 4
    STAND_INS["decode_attention_cpu"](
        q, our_k, our_v, 1.0, 1.0, ours, k, v, new_slots, torch.empty(0),
        batch.table, batch.rows, batch.lengths, scale, 0.0, False, 0,
    )  # fmt: skip
    their_k[new_slots], their_v[new_slots] = k, v
    decode_attention_fwd(
        q,
        their_k,
        their_v,
        theirs,
        cumulative(batch.lengths),
        torch.cat(slots).long(),
        torch.zeros(batch.size, HEADS, splits, HEAD_DIM),
        torch.zeros(batch.size, HEADS, splits),
        torch.full((batch.size,), splits, dtype=torch.int32),
        splits,
        scale,
        1.0,
        1.0,
    )
    return (
        {"output": ours, "k": our_k, "v": our_v},
        {"output": theirs, "k": their_k, "v": their_v},
    )


@case("causal")
@case("tree")
@case("latent")
def extend_attention_cpu(rng: random.Random, kind: str) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    batch = Batch(rng)
    # MLA expands keys and values where there is no prefix, and stores them in another form
    prefixes = (batch.lengths * 0 if kind == "latent" else batch.lengths - 1).tolist()
    nodes = rng.randint(1, 16)
    new = [nodes if kind == "tree" else rng.randint(1, 20) for _ in prefixes]
    totals = [prefix + n for prefix, n in zip(prefixes, new, strict=True)]
    starts = cumulative(torch.tensor(new))
    k_buffer, v_buffer = batch.random_buffers()
    q = torch.randn(sum(new), HEADS, HEAD_DIM)
    k, v = torch.randn(2, sum(new), HEADS, HEAD_DIM)
    own = (k, v) if kind == "latent" else (None, None)
    tree = [(torch.rand(n, n) < 0.5).fill_diagonal_(True) for n in new]
    tree_mask = torch.cat([mask.flatten() for mask in tree]) if kind == "tree" else None
    ours, theirs = torch.zeros_like(q), torch.zeros_like(q)
    STAND_INS["extend_attention_cpu"](
        q, *own, ours, k_buffer, v_buffer, 1.0, 1.0, batch.table, batch.rows,
        torch.tensor(totals), torch.tensor(new), starts[:-1], max(new), HEAD_DIM**-0.5, 0.0,
        False, 0, None, None, tree_mask,
    )  # fmt: skip
    prefix_slots, new_slots, full_masks = [], [], []
    for i, (prefix, n) in enumerate(zip(prefixes, new, strict=True)):
        slots = batch.slots(i, prefix + n).long()
        prefix_slots.append(slots[:prefix])
        new_slots.append(slots[prefix:])
        # The Triton kernel's mask has columns for the prefix too.
        full_masks.append(torch.cat((torch.ones(n, prefix).bool(), tree[i]), 1).flatten())
    extend_attention_fwd(
        q,
        k if kind == "latent" else k_buffer[torch.cat(new_slots)],
        v if kind == "latent" else v_buffer[torch.cat(new_slots)],
        theirs,
        k_buffer,
        v_buffer,
        starts,
        cumulative(torch.tensor(prefixes)),
        torch.cat(prefix_slots),
        torch.cat(full_masks) if kind == "tree" else None,
        kind != "tree",
        cumulative(torch.tensor([len(mask) for mask in full_masks])).long(),
        max(new),
        1.0,
        1.0,
        HEAD_DIM**-0.5,
    )
    return {"output": ours}, {"output": theirs}


# --------------------------------------------------------------------------------- draft tree
def random_tree(rng: random.Random, size: int, topk: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """(parents, selected, tokens, steps) as the draft's search leaves them."""
    from sglang.srt.speculative.eagle_utils import organize_draft_results

    steps = rng.choice([2, 3, 4])
    candidates = topk + (steps - 1) * topk * topk
    nodes = steps + 1 if topk == 1 else rng.randint(2, min(17, candidates + 1))
    scores = torch.rand(size, topk).sort(-1, descending=True).values
    score_list = [scores[:, None]]
    token_list = [torch.randint(6, (size, topk))]
    parent_list = [torch.arange(-1, topk).repeat(size, 1)]
    for step in range(1, steps):
        expanded = scores[:, :, None] * torch.rand(size, topk, topk)
        scores, chosen = expanded.flatten(1).topk(topk, -1)
        score_list.append(expanded)
        token_list.append(torch.randint(6, (size, topk * topk)))
        parent_list.append(chosen + topk * topk * (step - 1) + topk)
    parents, selected, tokens = organize_draft_results(score_list, token_list, parent_list, nodes)
    return parents, selected, tokens, steps


class TreeBuffers:
    """What building and verifying a batch of trees writes, filled with recognisable junk."""

    def __init__(self, size: int, nodes: int, steps: int, mask_size: int) -> None:
        self.mask = torch.ones(mask_size, dtype=torch.bool)
        self.positions = torch.full((size * nodes,), -7)
        self.links = [torch.full((size, nodes), -1) for _ in range(3)]
        self.predicts = torch.full((size * nodes,), -7, dtype=torch.int32)
        self.accept_index = torch.full((size, steps + 1), -1, dtype=torch.int32)
        self.accepted = torch.full((size,), -7, dtype=torch.int32)


@case(1, 0)
@case(1, 1)
@case(2, 1)
@case(4, 0)
@case(4, 1)
def build_tree_kernel_efficient_cpu(
    rng: random.Random, topk: int, mask_mode: int
) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    size = rng.randint(1, 4)
    parents, selected, tokens, steps = random_tree(rng, size, topk)
    nodes = tokens.shape[1] + 1
    lengths = torch.tensor([rng.randint(1, 40) for _ in range(size)])
    mask_size = size * nodes * nodes + (int(lengths.sum()) * nodes if mask_mode == 0 else 0)
    outcomes = []
    build = STAND_INS["build_tree_kernel_efficient_cpu"]
    for kernel in (build, sgl_build_tree_kernel_triton):
        b = TreeBuffers(size, nodes, steps, mask_size)
        kernel(
            parents, selected, lengths, b.mask, b.positions, *b.links, topk, steps, nodes, mask_mode
        )
        index, child, sibling = b.links
        outcomes.append(
            {
                "mask": b.mask,
                "positions": b.positions,
                "index": index,
                "child": child,
                "sibling": sibling,
            }
        )
    return outcomes[0], outcomes[1]


@case(1)
@case(2)
@case(4)
def verify_tree_greedy_cpu(rng: random.Random, topk: int) -> tuple[Outcome, Outcome]:
    from sglang.kernels.ops.speculative.spec_tree import (
        sgl_build_tree_kernel_triton,
        verify_tree_greedy_triton,
    )

    size = rng.randint(1, 4)
    parents, selected, tokens, steps = random_tree(rng, size, topk)
    nodes = tokens.shape[1] + 1
    candidates = torch.cat((torch.randint(6, (size, 1)), tokens), 1)
    built = TreeBuffers(size, nodes, steps, size * nodes * nodes)
    sgl_build_tree_kernel_triton(
        parents, selected, torch.full((size,), 9), built.mask, built.positions, *built.links,
        topk, steps, nodes, 1,
    )  # fmt: skip
    target_choice = torch.randint(6, (size, nodes))
    # Random choices alone would rarely accept a whole path.
    follow_draft = torch.rand(size, nodes) < 0.6
    child = built.links[1].clamp(min=0)
    target_choice = torch.where(follow_draft, candidates.gather(1, child), target_choice)
    outcomes = []
    for kernel in (STAND_INS["verify_tree_greedy_cpu"], verify_tree_greedy_triton):
        b = TreeBuffers(size, nodes, steps, 0)
        kernel(b.predicts, b.accept_index, b.accepted, candidates, *built.links, target_choice)
        # What lies behind the accepted path is scratch space.
        paths = [b.accept_index[i, : n + 1] for i, n in enumerate(b.accepted.tolist())]
        path = torch.cat(paths)
        outcomes.append({"path": path, "accepted": b.accepted, "predicts": b.predicts[path.long()]})
    return outcomes[0], outcomes[1]


# ------------------------------------------------------------------------------------ running
def differences(run: Case) -> Iterator[str]:
    """One line for each result in which stand-in and reference differ."""
    for seed in range(ROUNDS):
        torch.manual_seed(seed)
        ours, theirs = run(random.Random(seed))
        for name, value in theirs.items():
            try:
                torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
            except AssertionError as error:
                yield f"seed {seed}, {name}: {error}"


def report(run: Case) -> list[str]:
    try:
        return list(differences(run))
    except Exception:
        return [traceback.format_exc()]


def main() -> None:
    results = {
        kernel: {name: report(run) for name, run in cases.items()}
        for kernel, cases in CASES.items()
    }
    with open(sys.argv[1], "w") as result:
        json.dump(results, result)


if __name__ == "__main__":
    main()
