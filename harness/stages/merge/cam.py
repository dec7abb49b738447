"""CaM: values of tokens that go are added, by chance in proportion to their attention, to the kept tokens that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.merge.parting import NEVER, Merge, Merged, Parting


@dataclass(frozen=True, kw_only=True)
class CaM(Merge):
    """CaM (Cache Merging, ICML 2024; kvpress: CAMPress). Keys stay as they are.

    A token i that goes is merged with probability clamp(A_i / mean of A over its receivers, 0, 1), A the attention received so
    far (mean over the query heads of a KV head); its receivers are the `tokens` kept tokens that follow it, fewer at the end of
    the cache, and each gets v_i divided by their number. One draw a token and KV head, from the example's seed. A token that
    no kept one follows is dropped.

    Differs from the authors' code: it compares the newest query's attention alone, takes its mean over the whole recent window,
    and has one token go at a time (for OPT and GPT-NeoX without chance: wherever the ratio exceeds 1); here any number go at
    once, and attention is summed, as the paper writes it.

    threshold: smallest probability of a merge; 0 as published.
    The attention sums are stored with the cache while it goes on evicting: 4 bytes a token and KV head, shared with a scorer
    that keeps the same ones.
    """

    tokens: int = 32
    threshold: float | str = 0.0
    changes: ClassVar[tuple[str, ...]] = ("values",)
    keeps_sums: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ok = isinstance(self.tokens, int) and not isinstance(self.tokens, bool) and self.tokens > 0
        require(ok, "merge.tokens", self.tokens, "a positive number of kept tokens that share a value")
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool) and 0 <= self.threshold <= 1
        require(number or self.threshold == NEVER, "merge.threshold", self.threshold, f"a probability, or {NEVER!r}")

    def merge(self, parting: Parting) -> Merged:
        assert parting.sums_HN is not None and not isinstance(self.threshold, str)
        m = parting.stay_HM.shape[1]
        first_HE = torch.searchsorted(parting.stay_HM, parting.go_HE)
        last_HE = (first_HE + self.tokens).clamp(max=m)
        count_HE = last_HE - first_HE
        stay_HM = parting.sums_HN.gather(1, parting.stay_HM)
        running = torch.nn.functional.pad(stay_HM.cumsum(1), (1, 0))
        mean_HE = (running.gather(1, last_HE) - running.gather(1, first_HE)) / count_HE.clamp(min=1)
        own_HE = parting.sums_HN.gather(1, parting.go_HE)
        chance_HE = torch.where(mean_HE > 0, own_HE / mean_HE, (own_HE > 0).float()).clamp(0, 1)
        joins_HE = (parting.chance_HE < chance_HE) & (chance_HE >= self.threshold) & (count_HE > 0)
        share = parting.going(parting.v_HND) * (joins_HE / count_HE.clamp(min=1)).float()[..., None]
        added = _between(share, first_HE, last_HE, m)
        took_HM = _between(joins_HE[..., None].float(), first_HE, last_HE, m)[..., 0] > 0.5
        added = added.masked_fill(~took_HM[..., None], 0)  # sums that cancel leave a last digit
        return Merged(took_HM, joins_HE.sum(1), v_HMD=parting.staying(parting.v_HND) + added)


def _between(x_HED: Tensor, first_HE: Tensor, last_HE: Tensor, m: int) -> Tensor:
    """For each of m kept tokens the sum of the x whose receivers first .. last - 1 it is among, [H, m, D] fp32."""
    h, _, d = x_HED.shape
    starts = torch.arange(0, h * (m + 1), m + 1, device=x_HED.device)[:, None]
    edges = torch.zeros(h * (m + 1), d, dtype=torch.float32, device=x_HED.device)
    x = x_HED.flatten(0, 1).float()
    edges.index_add_(0, (first_HE + starts).flatten(), x)
    edges.index_add_(0, (last_HE + starts).flatten(), -x)
    return edges.view(h, m + 1, d).cumsum(1)[:, :m]
