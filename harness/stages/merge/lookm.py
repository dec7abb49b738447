"""LOOK-M's pivotal merging: every token that goes is averaged into the kept token with the most similar key."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.stages.merge.matching import most_similar, summed
from harness.stages.merge.parting import Merge, Merged, Parting, check_cosine


@dataclass(frozen=True, kw_only=True)
class LookM(Merge):
    """LOOK-M (arXiv 2406.18139), pivotal merging, as the authors' code; kvpress: none.

    A token e that goes joins the kept token c of the largest cosine of keys, over sinks, chosen and recent tokens alike. With
    the n tokens e of one c: x_c' = (x_c + sum_e (x_e + x_c) / 2) / (n + 1), for keys and for values.

    threshold: smallest cosine of a merge; -1, as published, merges every token.
    Keys are merged as they are stored, after RoPE: a merged key mixes rotations of different positions, and is read at the kept
    token's. LOOK-M also prefers text to image tokens, which is a scorer's matter. Nothing is kept between evictions.
    """

    threshold: float | str = -1.0

    def __post_init__(self) -> None:
        check_cosine(self.threshold)

    def merge(self, parting: Parting) -> Merged:
        assert not isinstance(self.threshold, str)
        go_k, stay_k = parting.going(parting.k_HND), parting.staying(parting.k_HND)
        cosine_HE, at_HE = most_similar(go_k, stay_k)
        joins_HE1 = (cosine_HE >= self.threshold)[..., None].float()
        m = stay_k.shape[1]
        n_HM1 = summed(joins_HE1, at_HE, m)

        def pivoted(stay: Tensor, go: Tensor) -> Tensor:
            return (stay + (summed(go * joins_HE1, at_HE, m) + n_HM1 * stay) / 2) / (n_HM1 + 1)

        go_v, stay_v = parting.going(parting.v_HND), parting.staying(parting.v_HND)
        return Merged(n_HM1[..., 0] > 0, joins_HE1.sum((1, 2)).long(), k_HMD=pivoted(stay_k, go_k), v_HMD=pivoted(stay_v, go_v))
