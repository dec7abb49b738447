"""KVMerger-type merging: runs of similar keys are merging sets, and a Gaussian kernel weights what joins a kept token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from harness.stages.merge.matching import summed
from harness.stages.merge.parting import Merge, Merged, Parting, check_cosine


@dataclass(frozen=True, kw_only=True)
class KVMerger(Merge):
    """KVMerger (arXiv 2407.08454), its merging sets and weights around tokens that a scorer keeps; kvpress: none.

    Sets: stored tokens in position order are cut wherever the cosine of two neighbours' keys is below `threshold`. Of a run,
    each token that goes joins the nearest kept token of the run, the earlier of two equally near; a run without one is dropped.
    Weights: g = exp(-|k_p - k_i|^2 / (2 sigma^2)) for the tokens i of kept token p, sigma their mean distance |k_p - k_i|,
    g_p = 1; x_p' = (x_p + sum g_i x_i) / (1 + sum g_i), for keys and values.

    A variant: the paper takes the most attended token of a set as its pivot and lets the sets decide how many tokens stay; here
    the scorer and the budget do. Keys are merged after RoPE, and read at the kept token's position. Nothing is kept between
    evictions.
    """

    threshold: float | str = 0.75

    def __post_init__(self) -> None:
        check_cosine(self.threshold)

    def merge(self, parting: Parting) -> Merged:
        at_HE, joins_HE = self._sets(parting)
        go_k, stay_k = parting.going(parting.k_HND), parting.staying(parting.k_HND)
        m, d = stay_k.shape[1:]
        joins_HE1 = joins_HE[..., None].float()
        n_HM1 = summed(joins_HE1, at_HE, m)
        distance_HE1 = (go_k - stay_k.gather(1, at_HE[..., None].expand(-1, -1, d))).norm(dim=-1, keepdim=True)
        sigma_HM1 = summed(distance_HE1 * joins_HE1, at_HE, m) / n_HM1.clamp(min=1)
        sigma_HE1 = sigma_HM1.gather(1, at_HE[..., None])
        ratio_HE1 = torch.where(sigma_HE1 > 0, distance_HE1 / sigma_HE1, 0.0)  # equal keys weigh equally
        g_HE1 = (-ratio_HE1.square() / 2).exp() * joins_HE1
        total_HM1 = summed(g_HE1, at_HE, m) + 1

        def weighted(stay: Tensor, go: Tensor) -> Tensor:
            return (stay + summed(go * g_HE1, at_HE, m)) / total_HM1

        v = weighted(parting.staying(parting.v_HND), parting.going(parting.v_HND))
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
