"""Attention weights of the last queries of a text, a few heads at a time: scores of all at once would not fit a CPU's cache."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.stages.softmax import Softmax

BLOCK_ELEMENTS = 1 << 19  # scores of the heads that a CPU treats together


def window_weights(q_QWD: Tensor, k_HND: Tensor, pos_HN: Tensor, seen: int, scaling: float, softmax: Softmax) -> Tensor:
    """Weights of the queries of tokens seen - W .. seen - 1 over N tokens, [H, W, N] fp32, mean over each query group.

    A query does not see tokens at later positions. q, k: fp32. pos_HN: positions of the tokens.
    """
    (n_q, w, _), (h, n, _) = q_QWD.shape, k_HND.shape
    group = n_q // h
    block = max(1, BLOCK_ELEMENTS // (group * w * n)) if k_HND.device.type == "cpu" else h
    query_W = torch.arange(seen - w, seen, device=k_HND.device)
    found = []
    for start in range(0, h, block):
        heads, queries = slice(start, start + block), slice(start * group, (start + block) * group)
        rule, pos = softmax.of(queries), pos_HN[heads]
        q_HGWD = q_QWD[queries].unflatten(0, (-1, group))
        s_HGWN = torch.einsum("hgwd,hnd->hgwn", q_HGWD, k_HND[heads]).mul_(scaling)
        hidden, beyond = pos[:, None, None, :] > query_W[:, None], rule.hidden(pos, query_W)
        hidden = hidden if beyond is None else hidden | beyond
        found.append(rule.weights(s_HGWN, pos, hidden).mean(1))
    return found[0] if len(found) == 1 else torch.cat(found)
