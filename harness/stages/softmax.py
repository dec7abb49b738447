"""What the softmax of a layer has besides scaled q.k: a soft cap, learned sinks, position biases, a window of its own.

Attention and every statistic take their weights from here, so that a scorer sees the attention that the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 19  # scores of the heads that a CPU treats together: those of all heads at once would not fit its cache


@dataclass(frozen=True, eq=False)
class Alibi:
    """ALiBi (arXiv 2108.12409): a bias that grows with a key's position, by the slope of its query head.

    slopes_Q: in the dtype that the model multiplies in. dtype: what it rounds the product to. divisor: what it divides that by.
    from_newest: positions are counted from the newest key; else from the first token. A softmax cannot tell them apart, but
    rounding can, so each family keeps its own.
    """

    slopes_Q: Tensor
    dtype: torch.dtype
    divisor: float = 1.0
    from_newest: bool = False

    def of(self, pos_HN: Tensor) -> Tensor:
        """Biases [..., H, G, N] fp32 of keys at positions pos [..., H, N], the newest last, for G query heads each."""
        pos = pos_HN.long()
        if self.from_newest:
            pos = pos - pos[..., -1:]
        slopes_HG1 = self.slopes_Q.to(pos.device).view(pos.shape[-2], -1, 1)
        return ((slopes_HG1 * pos[..., None, :]).to(self.dtype) / self.divisor).float()


@dataclass(frozen=True, eq=False)
class Softmax:
    """One softmax rule for Q query heads; without settings it is the plain one.

    cap: scores s become cap * tanh(s / cap). sinks_Q: one more logit for each query head, which takes weight and has no value.
    alibi: biases from the positions of keys. sees: a query sees keys of the newest `sees` positions only, itself included,
    where the cache holds more than that.
    """

    cap: float | None = None
    sinks_Q: Tensor | None = None
    alibi: Alibi | None = None
    sees: int | None = None

    @cached_property
    def plain(self) -> bool:
        """Whether weights are those of softmax(s) alone."""
        return self.cap is None and self.sinks_Q is None and not self.positional

    @cached_property
    def positional(self) -> bool:
        """Whether the positions of keys matter beyond their order."""
        return self.alibi is not None or self.sees is not None

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers must share to be computed in one call."""
        alibi = self.alibi and (self.alibi.dtype, self.alibi.divisor, self.alibi.from_newest)
        return self.cap, self.sinks_Q is not None, alibi, self.sees

    def of(self, heads: slice) -> Softmax:
        """The rule of some of the query heads."""
        return self._with(lambda per_head: per_head[heads])

    def _with(self, change: Callable[[Tensor], Tensor]) -> Softmax:
        if self.sinks_Q is None and self.alibi is None:
            return self
        sinks = None if self.sinks_Q is None else change(self.sinks_Q)
        alibi = self.alibi and replace(self.alibi, slopes_Q=change(self.alibi.slopes_Q))
        return replace(self, sinks_Q=sinks, alibi=alibi)

    @staticmethod
    def join(rules: Sequence[Softmax]) -> Softmax:
        """The rule of the heads of several layers of one kind."""
        first = rules[0]
        sinks = [one.sinks_Q for one in rules if one.sinks_Q is not None]
        slopes = [one.alibi.slopes_Q for one in rules if one.alibi is not None]
        alibi = first.alibi and replace(first.alibi, slopes_Q=torch.cat(slopes))
        return first if len(rules) == 1 else replace(first, sinks_Q=torch.cat(sinks) if sinks else None, alibi=alibi)

    def hidden(self, pos_HN: Tensor, query_L: Tensor) -> Tensor | None:
        """[..., H, 1, L, N]: keys that `sees` hides from queries at positions query [..., L]; None if it hides nothing."""
        if self.sees is None:
            return None
        return pos_HN[..., :, None, None, :] <= query_L[..., None, None, :, None] - self.sees

    def weights(self, s_HGLN: Tensor, pos_HN: Tensor | None, hidden: Tensor | None) -> Tensor:
        """Attention weights [..., H, G, L, N] of scaled scores, fp32, which are overwritten; those of sinks are left out.

        pos_HN [..., H, N]: positions of the keys, for biases. hidden: bool, what queries do not see, broadcast to the scores.
        """
        if self.cap is not None:
            s_HGLN.div_(self.cap).tanh_().mul_(self.cap)
        if self.alibi is not None:
            assert pos_HN is not None
            s_HGLN.add_(self.alibi.of(pos_HN)[..., None, :])
        if hidden is not None:
            s_HGLN.masked_fill_(hidden, float("-inf"))
        if self.sinks_Q is None:
            return s_HGLN.softmax(-1)
        sinks_HG11 = self.sinks_Q.to(s_HGLN.device).float().view(*s_HGLN.shape[-4:-2], 1, 1)
        both = torch.cat((s_HGLN, sinks_HG11.expand(*s_HGLN.shape[:-1], 1)), -1)
        return both.softmax(-1)[..., :-1]


PLAIN = Softmax()


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
        q_HGWD = q_QWD[queries].reshape(-1, group, *q_QWD.shape[1:])
        s_HGWN = torch.einsum("hgwd,hnd->hgwn", q_HGWD, k_HND[heads]).mul_(scaling)
        hidden, beyond = pos[:, None, None, :] > query_W[:, None], rule.hidden(pos, query_W)
        hidden = hidden if beyond is None else hidden | beyond
        found.append(rule.weights(s_HGWN, pos, hidden).mean(1))
    return found[0] if len(found) == 1 else torch.cat(found)
