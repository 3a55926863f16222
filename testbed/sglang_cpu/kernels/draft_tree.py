"""The draft's token tree: its links and mask before verify, its accepted path after.

Node 0 of a request's tree is the last verified token; node i >= 1 is the i-th selected draft token.
`retrive` is the spelling of the op's arguments in SGLang.
"""

from __future__ import annotations

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill the links [requests, nodes], the flat `positions` and the flat `tree_mask`.

    selected_index [requests, nodes - 1]: place of each node among all candidates; candidates
    topk * g ... topk * g + topk - 1 are the children of group g, whose own place is
    parent_list[request, g] (group 0: children of node 0). Only mask rows of FULL_MASK (with
    columns for the prefix, already set by the caller) and QLEN_ONLY are written.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"the CPU test bed has no tree mask mode {tree_mask_mode}")
    nodes, mask_start = draft_token_num, 0
    for request, prefix in enumerate(verified_seq_len.tolist()):
        parents = _parents(selected_index[request].tolist(), parent_list[request].tolist(), topk)
        next_token, next_sibling = _links(parents)
        first = request * nodes
        retrive_index[request] = torch.arange(first, first + nodes)
        retrive_next_token[request] = torch.tensor(next_token)
        retrive_next_sibling[request] = torch.tensor(next_sibling)

        visible = torch.zeros(nodes, nodes, dtype=torch.bool)
        visible[:, 0] = True
        for node in range(1, nodes):
            path = _path_to_root(node, parents, depth)
            visible[node, path] = True
            positions[first + node] = prefix + len(path)
        positions[first] = prefix

        width = nodes + (prefix if tree_mask_mode == FULL_MASK else 0)
        rows = tree_mask[mask_start : mask_start + nodes * width].view(nodes, width)
        rows[:, width - nodes :] = visible
        mask_start += nodes * width


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's own choices down each tree until no child matches.

    candidates, target_predict, retrive_*: [requests, nodes]. accept_index [requests, max path]:
    flat indices of the accepted nodes, first the root. accept_token_num: accepted without the
    root. predicts (flat): the target's choice behind each accepted node.
    """
    choice = target_predict.flatten().tolist()
    for request, tokens in enumerate(candidates.tolist()):
        flat_index = retrive_index[request].tolist()
        child, sibling = (
            retrive_next_token[request].tolist(),
            retrive_next_sibling[request].tolist(),
        )
        path = [0]
        while len(path) < accept_index.shape[1]:
            wanted, node = choice[flat_index[path[-1]]], child[path[-1]]
            while node != -1 and tokens[node] != wanted:
                node = sibling[node]
            if node == -1:
                break
            path.append(node)
        accepted = [flat_index[node] for node in path]
        accept_index[request, : len(path)] = torch.tensor(accepted)
        accept_token_num[request] = len(path) - 1
        predicts[accepted] = target_predict.flatten()[accepted].to(predicts.dtype)


def _parents(selected: list[int], parent_list: list[int], topk: int) -> list[int | None]:
    """Each node's parent node; None for the root and where the parent was not selected."""
    node_of = {place: node for node, place in reversed(list(enumerate(selected, start=1)))}
    groups = [place // topk for place in selected]
    return [None] + [0 if group == 0 else node_of.get(parent_list[group]) for group in groups]


def _links(parents: list[int | None]) -> tuple[list[int], list[int]]:
    """(first child, next sibling) of each node, -1 for none; children in ascending order."""
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent is not None:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node
    return first_child, next_sibling


def _path_to_root(node: int, parents: list[int | None], depth: int) -> list[int]:
    """`node` and its ancestors below the root, at most `depth` of them."""
    path: list[int] = []
    current: int | None = node
    while current and len(path) < depth:
        path.append(current)
        current = parents[current]
    return path
