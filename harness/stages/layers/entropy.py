"""Layer budgets by the entropy of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch

from harness.errors import require
from harness.stages.apportion import apportion
from harness.stages.protocols import LayerBudget, LayerView, Needs


@dataclass(frozen=True, kw_only=True)
class Entropy(LayerBudget):
    """Layers whose attention is spread over more tokens keep more tokens (kvpress: none).

    With B = tokens - protected, n layers and H_l the entropy in nats of the attention weights of the last `window` queries,
    averaged over queries and KV heads (weights are averaged over a query group first):
    budget_l = protected + floor * B + (1 - floor) * n * B * H_l / sum(H).
    A layer gets at most the tokens it holds; the excess goes to the other layers. Rounded so that the mean stays `tokens`.

    A simple rule after the idea of CAKE (arXiv 2503.12491) and D2O (arXiv 2406.13035); neither formula is reproduced.

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
        weights = [Fraction(self._entropy(view)) for view in views]
        own = Fraction(str(self.floor)) * each
        room = [Fraction(view.n - protected) for view in views]
        extra = _fill([r - own for r in room], weights, (each - own) * len(views))
        return [share + protected for share in apportion([own + x for x in extra], len(views) * each)]

    def _entropy(self, view: LayerView) -> float:
        weights_HWN = view.window_attention(self.window)
        return float(torch.special.entr(weights_HWN).sum(-1).double().mean())


def _fill(room: Sequence[Fraction], weights: Sequence[Fraction], total: Fraction) -> list[Fraction]:
    """`total` in proportion to the weights, none above its room; equal shares once all weights left are 0."""
    out, open_ = [Fraction(0)] * len(room), list(range(len(room)))
    while open_:
        mass = sum((weights[i] for i in open_), Fraction(0))
        share = {i: total * weights[i] / mass if mass else total / len(open_) for i in open_}
        full = [i for i in open_ if share[i] >= room[i]]
        for i in full or open_:
            out[i] = min(share[i], room[i])
            total -= out[i]
        open_ = [i for i in open_ if i not in full] if full else []
    return out
