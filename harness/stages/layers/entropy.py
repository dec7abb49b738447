"""Layer budgets by the entropy of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.apportion import apportion, filled
from harness.stages.protocols import LayerBudget, LayerView, Needs
from harness.stages.transfers import fetched


@dataclass(frozen=True, kw_only=True)
class Entropy(LayerBudget):
    """Layers whose attention is spread over more tokens keep more tokens (kvpress: none).

    With B = tokens - protected, n layers and H_l the entropy in nats of the attention weights of the last `window` queries,
    averaged over queries and KV heads (weights are averaged over a query group first):
    budget_l = protected + floor * B + (1 - floor) * n * B * H_l / sum(H).
    A layer gets at most the tokens it holds; the excess goes to the other layers. Rounded so that the mean stays `tokens`.

    A simple rule after the idea of CAKE (arXiv 2503.12491), whose formula is not reproduced; D2O's (arXiv 2406.13035) is
    AttentionVariance.

    protected: as in Pyramid. floor: share of B that every layer gets whatever its entropy.
    """

    spends_all: ClassVar[bool] = True

    window: int = 32
    protected: int | None = None
    floor: float = 0.2
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    def __post_init__(self) -> None:
        ok = isinstance(self.window, int) and self.window > 0
        require(ok, "keep.layers.window", self.window, "a positive number of tokens")
        ok = self.protected is None or (isinstance(self.protected, int) and self.protected >= 0)
        require(ok, "keep.layers.protected", self.protected, "a number of tokens, 0 or more, or null for sinks + recent")
        ok = isinstance(self.floor, (int, float)) and 0 <= self.floor <= 1
        require(ok, "keep.layers.floor", self.floor, "a fraction, from 0 to 1")

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    def beyond(self, protected: int) -> LayerBudget:
        return self if self.protected is not None else replace(self, protected=protected)

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        protected = self.protected or 0
        each = tokens - protected
        if each < 1 or any(view.n <= tokens for view in views):
            return [tokens] * len(views)
        weights = [Fraction(float(one.double().mean())) for one in fetched([self._entropies(view) for view in views])]
        own = Fraction(str(self.floor)) * each
        room = [Fraction(view.n - protected) for view in views]
        extra = filled([r - own for r in room], weights, (each - own) * len(views))
        return [share + protected for share in apportion([own + x for x in extra], len(views) * each)]

    def _entropies(self, view: LayerView) -> Tensor:
        """In nats, of every KV head and query, [H, W] fp32; their mean is the host's work: not every device has float64."""
        found: Tensor = torch.special.entr(view.window_attention(self.window)).sum(-1)
        return found
