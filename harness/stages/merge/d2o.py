"""D2O: tokens similar enough to a kept one are merged into it by weights of similarity; a moving threshold decides which."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.merge.matching import most_similar, summed
from harness.stages.merge.parting import NEVER, Merge, Merged, Parting, check_cosine


@dataclass(frozen=True, kw_only=True)
class D2O(Merge):
    """D2O's compensation of evicted tokens (arXiv 2406.13035); kvpress: none.

    u_e is the largest cosine of the key of a token that goes with a kept key, c the token it is with. Tokens with u_e >= tau
    are merged: x_c' = (e x_c + sum exp(u_e) x_e) / (e + sum exp(u_e)), e = exp(1), for keys and values; the others are dropped.
    threshold "moving": tau is the mean of u at the first eviction of a layer and KV head, then beta * mean(u) + (1 - beta) *
    tau, brought up to date before it is used. A number: that cosine, at every eviction.

    A variant: after the first eviction the paper lets one token go at a time, whose u stands where the mean does; of several at
    once the mean is taken, as at the first. One tau per KV head, as heads keep different tokens here. The authors' code has one
    tau a layer, which u averaged over heads must reach, and takes the plain mean of x_c and all u_e x_e; weights and threshold
    are the paper's here. The paper's budgets by layer are `keep.layers=attention_variance`, which `compress=d2o` has.
    Under phases that go on evicting, tau counts as state: 4 bytes a layer and KV head. Keys are merged after RoPE, and read at
    the kept token's position.
    """

    threshold: float | str = "moving"
    beta: float = 0.7

    def __post_init__(self) -> None:
        if self.threshold != "moving":
            require(not isinstance(self.threshold, str) or self.threshold == NEVER, "merge.threshold", self.threshold, _ALLOWED)
            check_cosine(self.threshold)
        ok = isinstance(self.beta, int | float) and 0 < self.beta <= 1
        require(ok, "merge.beta", self.beta, "a number above 0 and at most 1: the weight of the newest similarities")

    @property
    def keeps_number(self) -> bool:
        return self.threshold == "moving"

    def merge(self, parting: Parting) -> Merged:
        go_k, stay_k = parting.going(parting.k_HND), parting.staying(parting.k_HND)
        cosine_HE, at_HE = most_similar(go_k, stay_k)
        tau_H = self._tau(cosine_HE, parting.state_H)
        joins_HE = cosine_HE >= tau_H[:, None]
        weight_HE1 = (cosine_HE.exp() * joins_HE)[..., None]
        m = stay_k.shape[1]
        total_HM1 = summed(weight_HE1, at_HE, m) + math.e

        def weighted(stay: Tensor, go: Tensor) -> Tensor:
            return (math.e * stay + summed(go * weight_HE1, at_HE, m)) / total_HM1

        took_HM = summed(joins_HE[..., None].float(), at_HE, m)[..., 0] > 0
        v = weighted(parting.staying(parting.v_HND), parting.going(parting.v_HND))
        return Merged(
            took_HM, joins_HE.sum(1), k_HMD=weighted(stay_k, go_k), v_HMD=v, state_H=tau_H if self.keeps_number else None
        )

    def _tau(self, cosine_HE: Tensor, before_H: Tensor | None) -> Tensor:
        if not isinstance(self.threshold, str):
            return torch.full_like(cosine_HE[:, 0], self.threshold)
        mean_H = cosine_HE.mean(1)
        return mean_H if before_H is None else self.beta * mean_H + (1 - self.beta) * before_H


_ALLOWED = "'moving' (D2O's own), a cosine from -1 to 1, or 'never'"
