"""Attention with a softmax that sdpa does not have (soft caps, learned sinks, biases), in query blocks; it knows no model.

Memory is one block of scores. Keys and values of a group of query heads are not repeated, and of a sliding window only the
keys that a block can see are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.stages.softmax import Softmax

BLOCK_ELEMENTS = 1 << 20  # scores in one block of a row


@dataclass(frozen=True)
class Seen:
    """Which keys the L new queries of R rows see; those before them are `past` keys.

    window: of the layer's cache. pos_RHN: positions of the keys, if the softmax looks at them.
    """

    past: int
    window: int | None = None
    pos_RHN: Tensor | None = None

    def low(self, query: int) -> int:
        """The first key that the query with this index sees."""
        return 0 if self.window is None else max(0, query - self.window + 1)

    def block(self, n_q: int, n: int) -> int:
        """Queries in a block, from what one row of n keys shows: whatever shares its batch, a row is summed alike."""
        if self.window is None or n <= 2 * self.window:
            return max(1, BLOCK_ELEMENTS // (n_q * n))
        return max(1, min(self.window, BLOCK_ELEMENTS // (n_q * 2 * self.window)))

    def hidden(
        self, softmax: Softmax, pos_RHN: Tensor | None, queries: slice, keys: slice, device: torch.device
    ) -> Tensor | None:
        """Bool, broadcast to scores [R, H, G, L, N] of some queries and keys; None if each sees all of these keys."""
        hidden = None
        if queries.stop - queries.start > 1:
            at_L1 = torch.arange(self.past + queries.start, self.past + queries.stop, device=device)[:, None]
            key_N = torch.arange(keys.start, keys.stop, device=device)
            hidden = key_N > at_L1
            if self.window is not None:
                hidden |= key_N <= at_L1 - self.window
        if pos_RHN is not None and self.pos_RHN is not None and softmax.sees is not None:
            new_RL = self.pos_RHN[:, 0, self.past :][:, queries]  # new tokens stand at one place in all heads
            beyond = softmax.hidden(pos_RHN, new_RL)
            hidden = beyond if hidden is None or beyond is None else beyond | hidden
        return hidden


def softmax_attention(q_RQLD: Tensor, k_RHND: Tensor, v_RHND: Tensor, scaling: float, softmax: Softmax, seen: Seen) -> Tensor:
    """Outputs [R, L, Q, D]: products in the tensors' dtype, weights in fp32. The L queries are those of the last L tokens."""
    (r, n_q, length, d), (_, h, n, _) = q_RQLD.shape, k_RHND.shape
    group, past = n_q // h, n - length
    q_XGLD = q_RQLD.reshape(r * h, group, length, d)
    k_XND, v_XND = k_RHND.flatten(0, 1), v_RHND.flatten(0, 1)
    out = v_RHND.new_empty(r, length, n_q, v_RHND.shape[-1])
    block = seen.block(n_q, n)
    for start in range(0, length, block):
        stop = min(start + block, length)
        low, high = seen.low(past + start), past + stop
        q, k, v = q_XGLD[:, :, start:stop].flatten(1, 2), k_XND[:, low:high], v_XND[:, low:high]
        s = _scores(q, k, scaling).view(r, h, group, stop - start, high - low)
        pos = None if seen.pos_RHN is None else seen.pos_RHN[..., low:high]
        weights = softmax.weights(s, pos, seen.hidden(softmax, pos, slice(start, stop), slice(low, high), s.device))
        found = torch.bmm(weights.to(v.dtype).view(r * h, -1, high - low), v)
        out[:, start:stop] = found.view(r, n_q, stop - start, -1).transpose(1, 2)
    return out


def _scores(q_XMD: Tensor, k_XND: Tensor, scaling: float) -> Tensor:
    """Scaled q.k, fp32. Half-precision queries are scaled after the product, for their own dtype would round them."""
    if q_XMD.dtype == torch.float32:
        return torch.bmm(q_XMD * scaling, k_XND.mT)
    return torch.bmm(q_XMD, k_XND.mT).float().mul_(scaling)
