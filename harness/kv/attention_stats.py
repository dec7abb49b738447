"""Statistics for scorers, computed from the queries and keys of an attention call.

In query blocks, so that no N x N matrix is ever held: memory is one block of scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.stages.protocols import Rope
from harness.stages.softmax import PLAIN, Softmax

BLOCK_ELEMENTS = 1 << 20  # scores in one block (4 MiB of fp32): large enough for a fast matmul, small enough for a CPU's cache
LARGE_BLOCK = 1 << 26  # the same of an accelerator (256 MiB), which has no such cache and is slow with many small kernels


def column_sums(q_QLD: Tensor, k_HND: Tensor, scaling: float, softmax: Softmax = PLAIN, pos_HN: Tensor | None = None) -> Tensor:
    """For every token the sum of its attention weights over the L newest queries, [H, N] fp32, mean over each query group.

    The L queries are those of the last L tokens; query i sees the tokens up to its own. Exact softmax in fp32.
    pos_HN: positions of the tokens, for a softmax that looks at them.
    """
    (n_q, n_new, d), (h, n, _) = q_QLD.shape, k_HND.shape
    group, past = n_q // h, n - n_new
    q_HLGD = (q_QLD.float() * scaling).reshape(h, group, n_new, d).transpose(1, 2)
    k_HDN = k_HND.float().transpose(1, 2)
    sums_HN = torch.zeros(h, n, device=k_HND.device)
    most = BLOCK_ELEMENTS if k_HND.device.type == "cpu" else LARGE_BLOCK
    block = min(max(1, most // (h * group * n)), n_new)
    scores, weights = (k_HDN.new_empty(h * block * group * n) for _ in range(2))  # one memory for all blocks
    for start in range(0, n_new, block):
        stop = min(start + block, n_new)
        r, seen = stop - start, past + stop
        s_HMN, w_HMN = (x[: h * r * group * seen].view(h, r * group, seen) for x in (scores, weights))
        torch.bmm(q_HLGD[:, start:stop].reshape(h, r * group, d), k_HDN[:, :, :seen], out=s_HMN)
        s_HRGN = s_HMN.view(h, r, group, seen)
        if not softmax.plain:
            pos = None if pos_HN is None else pos_HN[:, :seen]
            hidden = _hidden(softmax, pos, range(past + start, seen), k_HND.device)
            sums_HN[:, :seen] += softmax.weights(s_HRGN.transpose(1, 2), pos, hidden).sum((1, 2))
            continue
        if r > 1:
            hidden_R1R = torch.ones(r, r, dtype=torch.bool, device=k_HND.device).triu(1)[:, None]
            s_HRGN[..., past + start :].masked_fill_(hidden_R1R, float("-inf"))
        sums_HN[:, :seen] += torch.softmax(s_HMN, -1, out=w_HMN).sum(1)
    return sums_HN / group


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
