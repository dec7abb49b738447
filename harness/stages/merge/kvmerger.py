"""KVMerger-type merging: runs of similar keys are merging sets, and a Gaussian kernel weights what joins a kept token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from harness.errors import require
from harness.stages.merge.matching import summed
from harness.stages.merge.parting import Merge, Merged, Parting, check_cosine


@dataclass(frozen=True, kw_only=True)
class KVMerger(Merge):
    """KVMerger (arXiv 2407.08454), its merging sets and weights around tokens that a scorer keeps; kvpress: none.

    Sets: stored tokens in position order are cut wherever the cosine of two neighbours' keys is below `threshold`. Of a run,
    each token that goes joins the nearest kept token of the run, the earlier of two equally near; a run without one is dropped.
    Weights: g_i = exp(-|k_p - k_i|^2 / (2 sigma^2)) for the n tokens i that join kept token p, g_p = 1, w = g / sum of g.
    k_p' = w_p k_p + sum w_i k_i; v_p' = (n + 1) (w_p v_p + sum w_i v_i): the paper's values stand for as many as were merged.

    sigma: "set", the mean distance |k_p - k_i| of the n tokens over sqrt(2); or one number for all sets, of which the paper
    finds 5 the best. Its formula gives sigma by the very weights that sigma defines; distances are read in their place.

    A variant: the paper takes the most attended token of a set as its pivot and lets the sets decide how many tokens stay; here
    the scorer and the budget do. Keys are merged after RoPE, and read at the kept token's position. Nothing is kept between
    evictions.
    """

    threshold: float | str = 0.75
    sigma: float | str = "set"

    def __post_init__(self) -> None:
        check_cosine(self.threshold)
        number = isinstance(self.sigma, int | float) and not isinstance(self.sigma, bool) and 0 < self.sigma < math.inf
        require(number or self.sigma == "set", "merge.sigma", self.sigma, "a positive distance, or 'set' (of each merging set)")

    def merge(self, parting: Parting) -> Merged:
        at_HE, joins_HE = self._sets(parting)
        go_k, stay_k = parting.going(parting.k_HND), parting.staying(parting.k_HND)
        m, d = stay_k.shape[1:]
        joins_HE1 = joins_HE[..., None].float()
        n_HM1 = summed(joins_HE1, at_HE, m)
        distance_HE1 = (go_k - stay_k.gather(1, at_HE[..., None].expand(-1, -1, d))).norm(dim=-1, keepdim=True)
        if isinstance(self.sigma, str):
            mean_HM1 = summed(distance_HE1 * joins_HE1, at_HE, m) / n_HM1.clamp(min=1)
            sigma_HE1 = mean_HM1.gather(1, at_HE[..., None]) / math.sqrt(2)
        else:
            sigma_HE1 = torch.full_like(distance_HE1, self.sigma)
        ratio_HE1 = torch.where(sigma_HE1 > 0, distance_HE1 / sigma_HE1, 0.0)  # equal keys weigh equally
        g_HE1 = (-ratio_HE1.square() / 2).exp() * joins_HE1
        total_HM1 = summed(g_HE1, at_HE, m) + 1

        def weighted(stay: Tensor, go: Tensor) -> Tensor:
            return (stay + summed(go * g_HE1, at_HE, m)) / total_HM1

        v = weighted(parting.staying(parting.v_HND), parting.going(parting.v_HND)) * (n_HM1 + 1)
        return Merged(n_HM1[..., 0] > 0, joins_HE.sum(1), k_HMD=weighted(stay_k, go_k), v_HMD=v)

    def _sets(self, parting: Parting) -> tuple[Tensor, Tensor]:
        """(the kept token [H, E] that each token that goes would join, whether it is of the same run)."""
        assert not isinstance(self.threshold, str)
        k_HND = normalize(parting.k_HND, dim=-1)
        cut_HN = (k_HND[:, 1:] * k_HND[:, :-1]).sum(-1) < self.threshold
        run_HN = torch.nn.functional.pad(cut_HN.long().cumsum(1), (1, 0))
        stay, go, m = parting.stay_HM, parting.go_HE, parting.stay_HM.shape[1]
        after = torch.searchsorted(stay, go)  # the first kept token behind each
        sides = (after - 1).clamp(min=0), after.clamp(max=m - 1)
        far = torch.iinfo(torch.long).max
        run_go = run_HN.gather(1, go)
        gaps = []
        for side in sides:
            place = stay.gather(1, side)
            gaps.append(torch.where(run_HN.gather(1, place) == run_go, (place - go).abs(), far))
        earlier = gaps[0] <= gaps[1]
        return torch.where(earlier, *sides), torch.minimum(*gaps) < far
