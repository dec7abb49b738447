"""Which rows stay: sinks, recent rows, and the best of the rest; the only top-k of the project. It knows no storage format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.stages.budget.amount import Amount
from harness.stages.budget.uniform import Uniform as UniformLayers
from harness.stages.heads.uniform import Uniform as UniformHeads
from harness.stages.protocols import HeadBudget, LayerBudget, LayerView, Needs, Scorer
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

    @property
    def needs(self) -> Needs:
        """Statistics to record for the scorer and the budget of layers."""
        return self.scorer.needs | getattr(self.layers, "needs", Needs())

    def protected(self, tokens: int) -> tuple[int, int]:
        """(sinks, recent) under a budget of `tokens` rows; UserError when the budget is smaller than both together."""
        recent = self._recent(tokens)
        if tokens < 1 or tokens < self.sinks + recent:
            raise UserError(
                f"keep.budget.value={tokens} tokens is too small: sinks {self.sinks} + recent {recent} need at least "
                f"{max(self.sinks + recent, 1)}"
            )
        return self.sinks, recent

    def _recent(self, tokens: int) -> int:
        return max(self.scorer.default_recent(tokens, self.sinks) if self.recent is None else self.recent, 0)

    def select(self, views: Sequence[LayerView], tokens: int) -> list[list[Tensor] | None]:
        """For each layer the kept row indices, sorted int64: one [H, M] when all heads keep as many, else one [1, M] a head.

        None where everything stays.
        """
        alike: dict[tuple[int, int, torch.device], list[int]] = {}
        layers = self.layers.beyond(self.sinks + self._recent(tokens)) if hasattr(self.layers, "beyond") else self.layers
        for i, (view, most) in enumerate(zip(views, layers.split(tokens, views), strict=True)):
            if view.n > most:
                self._check_share(view.layer, most, tokens)
                alike.setdefault((view.n, most, view.pos_HN.device), []).append(i)
        chosen: list[list[Tensor] | None] = [None] * len(views)
        for (n, most, _), members in alike.items():  # layers that hold and keep as many rows are sorted together
            for i, index in zip(members, self._select([views[i] for i in members], n, most), strict=True):
                chosen[i] = index
        return chosen

    def _check_share(self, layer: int, most: int, tokens: int) -> None:
        """A layer's own budget must hold its sinks and recent rows, as the whole one must."""
        try:
            self.protected(most)
        except UserError as error:
            if most == tokens:
                raise
            name = type(self.layers).__name__
            raise UserError(f"keep.layers={name} gives layer {layer} {most} of {tokens} rows a head: {error}") from None

    def _scores(self, view: LayerView) -> Tensor:
        scores_HN = self.scorer.score(view)
        if scores_HN.shape != view.pos_HN.shape:
            wanted, given = tuple(view.pos_HN.shape), tuple(scores_HN.shape)
            raise UserError(f"keep.scorer={type(self.scorer).__name__} gave scores of shape {given}, not [H, N] = {wanted}")
        return scores_HN

    def _select(self, views: Sequence[LayerView], n: int, tokens: int) -> list[list[Tensor]]:
        sinks, recent = self.protected(tokens)
        stop = n - recent
        scores_KHM = torch.stack([self._scores(view)[:, sinks:stop].float() for view in views])
        finite_K = torch.isfinite(scores_KHM).flatten(1).all(1)
        if not bool(finite_K.all()):
            layer = views[int(finite_K.int().argmin())].layer
            raise UserError(f"keep.scorer={type(self.scorer).__name__} gave a score that is not finite in layer {layer}")
        order_KHM = scores_KHM.argsort(dim=-1, descending=True, stable=True)
        first, last = torch.arange(sinks, device=order_KHM.device), torch.arange(stop, n, device=order_KHM.device)

        def kept(order: Tensor, count: int) -> Tensor:
            middle = order[..., :count].sort(-1).values + sinks
            return torch.cat((first.expand(*middle.shape[:-1], -1), middle, last.expand(*middle.shape[:-1], -1)), -1)

        counts = [
            self.heads.split(tokens - sinks - recent, scores_HM, view.layer)
            for view, scores_HM in zip(views, scores_KHM, strict=True)
        ]
        if len({count for layer in counts for count in layer}) == 1:
            return [[index_HM] for index_HM in kept(order_KHM, counts[0][0])]
        return [
            [kept(order_HM[h : h + 1], count) for h, count in enumerate(layer)]
            for order_HM, layer in zip(order_KHM, counts, strict=True)
        ]
