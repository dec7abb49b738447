"""Layer budgets by the entropy of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.layers.beyond_protected import Weighted
from harness.stages.protocols import LayerView, Needs
from harness.stages.transfers import fetched


@dataclass(frozen=True, kw_only=True)
class Entropy(Weighted):
    """Layers whose attention is spread over more tokens keep more tokens (kvpress: none).

    With B = tokens - protected, n layers and H_l the entropy in nats of the attention weights of the last `window` queries,
    averaged over queries and KV heads (weights are averaged over a query group first):
    budget_l = protected + floor * B + (1 - floor) * n * B * H_l / sum(H).
    A layer gets at most the tokens it holds; the excess goes to the other layers. Rounded so that the mean stays `tokens`.

    A simple rule after the idea of CAKE (arXiv 2503.12491), whose formula is not reproduced; D2O's (arXiv 2406.13035) is
    AttentionVariance.

    protected: as in Pyramid. floor: share of B that every layer gets whatever its entropy.
    """

    window: int = 32
    floor: float = 0.2

    def __post_init__(self) -> None:
        ok = isinstance(self.window, int) and self.window > 0
        require(ok, "keep.layers.window", self.window, "a positive number of tokens")
        super().__post_init__()
        ok = isinstance(self.floor, (int, float)) and 0 <= self.floor <= 1
        require(ok, "keep.layers.floor", self.floor, "a fraction, from 0 to 1")

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    @property
    def least(self) -> Fraction:
        return Fraction(str(self.floor))

    def weights(self, views: Sequence[LayerView]) -> list[Fraction]:
        return [Fraction(float(one.double().mean())) for one in fetched([self._entropies(view) for view in views])]

    def _entropies(self, view: LayerView) -> Tensor:
        """In nats, of every KV head and query, [H, W] fp32; their mean is the host's work: not every device has float64."""
        found: Tensor = torch.special.entr(view.window_attention(self.window)).sum(-1)
        return found
