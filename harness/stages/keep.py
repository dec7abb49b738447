"""Which rows stay: sinks, recent rows, and the best of the rest; the only top-k of the project. It knows no storage format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.stages.budget.amount import Amount
from harness.stages.budget.uniform import Uniform as UniformLayers
from harness.stages.heads.uniform import Uniform as UniformHeads
from harness.stages.protocols import HeadBudget, LayerBudget, LayerView, Scorer
from harness.types import UserError, require


@dataclass(frozen=True, kw_only=True)
class Keep:
    """A budget of rows per layer and KV head, spent on `sinks` first rows, `recent` newest rows and the top scores between.

    recent null takes the scorer's own default. Protected rows are never scored; ties keep the earlier row; kept rows stay
    in position order.
    """

    scorer: Scorer
    budget: Amount
    sinks: int = 0
    recent: int | None = None
    layers: LayerBudget = field(default_factory=UniformLayers)
    heads: HeadBudget = field(default_factory=UniformHeads)

    def __post_init__(self) -> None:
        ok = isinstance(self.sinks, int) and self.sinks >= 0
        require(ok, "keep.sinks", self.sinks, "a number of tokens, 0 or more")
        ok = self.recent is None or (isinstance(self.recent, int) and self.recent >= 0)
        require(ok, "keep.recent", self.recent, "a number of tokens, 0 or more, or null for the scorer's default")
        if self.budget.unit == "tokens":
            self.protected(int(self.budget.value))

    def protected(self, tokens: int) -> tuple[int, int]:
        """(sinks, recent) under a budget of `tokens` rows; UserError when the budget is smaller than both together."""
        recent = self.scorer.default_recent(tokens, self.sinks) if self.recent is None else self.recent
        if tokens < 1 or tokens < self.sinks + max(recent, 0):
            raise UserError(
                f"keep.budget.value={tokens} tokens is too small: sinks {self.sinks} + recent {max(recent, 0)} need at least "
                f"{max(self.sinks + max(recent, 0), 1)}"
            )
        return self.sinks, recent

    def select(self, views: Sequence[LayerView], tokens: int) -> list[list[Tensor] | None]:
        """For each layer the kept row indices, sorted int64: one [H, M] when all heads keep as many, else one [1, M] a head.

        None where everything stays.
        """
        return [self._select_layer(view, n) for view, n in zip(views, self.layers.split(tokens, views), strict=True)]

    def _select_layer(self, view: LayerView, tokens: int) -> list[Tensor] | None:
        n = view.n
        if n <= tokens:
            return None
        sinks, recent = self.protected(tokens)
        stop = n - recent
        scores_HM = self.scorer.score(view)[:, sinks:stop].float()
        if not bool(torch.isfinite(scores_HM).all()):
            raise UserError(f"keep.scorer={type(self.scorer).__name__} gave a score that is not finite in layer {view.layer}")
        order_HM = scores_HM.argsort(dim=-1, descending=True, stable=True)
        counts = self.heads.split(tokens - sinks - recent, scores_HM)
        first, last = torch.arange(sinks, device=order_HM.device), torch.arange(stop, n, device=order_HM.device)

        def kept(order_KM: Tensor, count: int) -> Tensor:
            middle = order_KM[:, :count].sort(-1).values + sinks
            return torch.cat((first.expand(len(middle), -1), middle, last.expand(len(middle), -1)), 1)

        if len(set(counts)) == 1:
            return [kept(order_HM, counts[0])]
        return [kept(order_HM[h : h + 1], count) for h, count in enumerate(counts)]
