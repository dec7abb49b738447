"""Statistics for scorers, computed from the queries and keys of an attention call.

In query blocks, so that no N x N matrix is ever held: memory is one block of scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.kv.attending.onednn import has_linear, linear
from harness.stages.protocols import Rope
from harness.stages.softmax import PLAIN, Softmax

BLOCK_ELEMENTS = 1 << 20  # scores in one block (4 MiB of fp32), small enough for a CPU's cache
BLOCK_QUERIES = 64  # at most in one block: enough for a fast product, and few of its scores lie behind a query's own token
OWN_PRODUCT = 1 << 16  # scores of a head from which a product of its own is worth its call
LARGE_BLOCK = 1 << 26  # scores in a block of an accelerator (256 MiB), which has no such cache and is slow with small kernels


def column_sums(q_QLD: Tensor, k_HND: Tensor, scaling: float, softmax: Softmax = PLAIN, pos_HN: Tensor | None = None) -> Tensor:
    """For every token the sum of its attention weights over the L newest queries, [H, N] fp32, mean over each query group.

    The L queries are those of the last L tokens; query i sees the tokens up to its own. Exact softmax in fp32.
    pos_HN: positions of the tokens, for a softmax that looks at them.
    """
    (n_q, n_new, d), (h, n, _) = q_QLD.shape, k_HND.shape
    group, past, k_HND = n_q // h, n - n_new, k_HND.float()
    by_head = has_linear(k_HND) and (h == 1 or (softmax.plain and group * n_new * n >= OWN_PRODUCT))
    if by_head:
        k_HND = k_HND.contiguous()  # once, for all blocks
    if by_head and h > 1:
        heads = zip(q_QLD.chunk(h), k_HND.chunk(h), strict=True)
        return torch.cat([column_sums(q, k, scaling) for q, k in heads])
    factor = scaling / math.log(2) if softmax.plain else scaling
    q_HLGD = (q_QLD.float() * factor).reshape(h, group, n_new, d).transpose(1, 2)
    sums_HN = torch.zeros(h, n, device=k_HND.device)
    here = k_HND.device.type == "cpu"
    block = min(max(1, (BLOCK_ELEMENTS if here else LARGE_BLOCK) // (h * group * n)), BLOCK_QUERIES if here else n_new)
    for start in range(0, n_new, block):
        q_HMD = q_HLGD[:, start : start + block].flatten(1, 2)
        queries = range(past + start, min(past + start + block, n))
        seen_HND = k_HND[:, : queries.stop]
        s_HMN = linear(q_HMD[0], seen_HND[0])[None] if by_head else torch.bmm(q_HMD, seen_HND.mT)
        if softmax.plain:
            sums_HN[:, : queries.stop] += _plain_sums(s_HMN, queries)
        else:
            pos = None if pos_HN is None else pos_HN[:, : queries.stop]
            hidden = _hidden(softmax, pos, queries, k_HND.device)
            s_HGRN = s_HMN.view(h, len(queries), group, -1).transpose(1, 2)
            sums_HN[:, : queries.stop] += softmax.weights(s_HGRN, pos, hidden).sum((1, 2))
    return sums_HN / group


def _plain_sums(s_HMN: Tensor, queries: range) -> Tensor:
    """Sums [H, N] of the weights of scores, which are overwritten: of every query in turn those of its group.

    Scores are in base two, whose powers are several times as fast as those of e. Each query's sum divides its weights in the
    product that adds them up.
    """
    r = len(queries)
    if r > 1:
        hidden_R1R = torch.ones(r, r, dtype=torch.bool, device=s_HMN.device).triu(1)[:, None]
        s_HMN.view(len(s_HMN), r, -1, queries.stop)[..., queries.start :].masked_fill_(hidden_R1R, float("-inf"))
    s_HMN.sub_(s_HMN.amax(-1, keepdim=True)).exp2_()
    return torch.bmm(s_HMN.sum(-1).reciprocal_()[:, None], s_HMN)[:, 0]


def _hidden(softmax: Softmax, pos_HN: Tensor | None, queries: range, device: torch.device) -> Tensor:
    """What the newest queries (their indices) do not see of the tokens up to the last of them, broadcast to [H, 1, R, N]."""
    hidden = torch.arange(queries.stop, device=device) > torch.arange(queries.start, queries.stop, device=device)[:, None]
    beyond = None if pos_HN is None else softmax.hidden(pos_HN, pos_HN[0, queries.start :])  # new tokens: alike in all heads
    return hidden if beyond is None else beyond | hidden


def step_sums(q_RQD: Tensor, k_RHND: Tensor, softmax: Softmax = PLAIN, pos_RHN: Tensor | None = None) -> Tensor:
    """`column_sums` for a single new query in each of R sequences, fp32 and scaled, [R, H, N] fp32."""
    (r, n_q, d), h = q_RQD.shape, k_RHND.shape[1]
    q_RHGD = q_RQD.reshape(r, h, n_q // h, d)
    # Rows and heads in one axis: a product over two of them would copy keys that are a slice of something larger.
    scores = torch.bmm(q_RHGD.flatten(0, 1), k_RHND.float().flatten(0, 1).mT)
    if softmax.plain:
        return scores.softmax(-1).mean(1).view(r, h, -1)
    hidden = None if pos_RHN is None else softmax.hidden(pos_RHN, pos_RHN[:, 0, -1:])
    return softmax.weights(scores.view(r, h, n_q // h, 1, -1), pos_RHN, hidden)[..., 0, :].mean(2)


def query_moments(q_QLD: Tensor, rope: Rope | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
    """Mean [Q, D] and covariance [Q, D, D] (divided by L, 0 for a single query) of L queries, fp32, without their rotation.

    rope: the rotation of these queries, of which the first stands at position `start`; None: there is none to undo.
    """
    q_QLD = q_QLD.float()
    if rope is not None:
        q_QLD = rope.unrotate(q_QLD, torch.arange(start, start + q_QLD.shape[1], device=q_QLD.device))
    mean_Q1D = q_QLD.mean(1, keepdim=True)
    centred = q_QLD - mean_Q1D
    return mean_Q1D[:, 0], centred.mT @ centred / q_QLD.shape[1]


def distances(out: Tensor, reference: Tensor) -> Tensor:
    """[B, 2]: squared distance of each row's output to that of its reference, and the squared size of the latter."""
    flat, wanted = out.float().flatten(1), reference.float().flatten(1)
    return torch.stack(((flat - wanted).square().sum(1), wanted.square().sum(1)), 1)
