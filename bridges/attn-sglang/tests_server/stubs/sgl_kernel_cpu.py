"""CPU operators that n-gram speculation asks of ``sgl_kernel``, in torch: slow and obvious, for tests only."""

from __future__ import annotations

import ctypes

import torch


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move rows of every buffer: row ``src_loc[i]`` to row ``tgt_loc[i]``, all read before any is written."""
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + row * stride, stride) for row in src_loc.tolist()]
        for row, data in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(pointer + row * stride, data, stride)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """The slots of tokens ``start[i]`` to ``end[i]`` of each request, packed one after the other."""
    place = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[place : place + last - first] = req_to_token[request, first:last].to(out_cache_loc.dtype)
        place += last - first


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """The other way round: packed slots become the slots of tokens ``start[i]`` to ``end[i]`` of each request."""
    place = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[request, first:last] = out_cache_loc[place : place + last - first].to(req_to_token.dtype)
        place += last - first


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The slots of the accepted tokens, packed; -1 is no token."""
    kept = accept_index.flatten()
    kept = kept[kept >= 0].long()
    accept_out_cache_loc[: kept.numel()] = out_cache_loc[kept]


def reconstruct_indices_from_tree_mask(
    tree_mask, lens, positions, retrieve_index, next_token, next_sibling, batch_size, draft_token_num
):
    """Positions, first child and next sibling of every node, from bool[batch, n, n]: node i sees its ancestors."""
    n = draft_token_num
    tree = tree_mask.reshape(batch_size, n, n).bool()
    out = [
        x.view(-1)[: batch_size * n].view(batch_size, n) for x in (positions, retrieve_index, next_token, next_sibling)
    ]
    for b in range(batch_size):
        above = [[j for j in range(i) if tree[b, i, j]] for i in range(n)]
        parent = [max(nodes, default=-1) for nodes in above]
        for i in range(n):
            children = [k for k in range(i + 1, n) if i in above[k]]
            siblings = [k for k in range(i + 1, n) if parent[i] >= 0 and parent[k] == parent[i]]
            out[0][b, i] = int(lens[b]) + len(above[i])
            out[1][b, i] = b * n + i
            out[2][b, i] = min(children, default=-1)
            out[3][b, i] = min(siblings, default=-1)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each tree from its root along the drafts that the target would have chosen."""
    target = target_predict.flatten()
    for b in range(candidates.shape[0]):
        node, count = 0, 0
        last = int(retrive_index[b, 0])
        accept_index[b, 0] = last
        while count + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[b, node])
            while node != -1 and int(candidates[b, node]) != int(target[last]):
                node = int(retrive_next_sibling[b, node])
            if node == -1:
                break
            predicts[last] = target[last]
            count += 1
            last = int(retrive_index[b, node])
            accept_index[b, count] = last
        accept_token_num[b] = count
        predicts[last] = target[last]
    return torch.empty(0)
