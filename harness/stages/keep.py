"""Which tokens stay: sinks, recent tokens, and the top scores between them. The only top-k of the project."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.stages.budget import Amount
from harness.stages.heads.uniform_heads import Uniform as UniformHeads
from harness.stages.layers.uniform_layers import Uniform as UniformLayers
from harness.stages.protocols import HeadBudget, LayerBudget, LayerView, Needs, Scorer
from harness.stages.transfers import fetched


@dataclass(frozen=True, eq=False)
class Finite:
    """Whether the scores of each of these layers are all finite, bool [L]: on the device until somebody looks."""

    scorer: str
    layers: tuple[int, ...]
    fine_L: Tensor


@dataclass(frozen=True)
class Choice:
    """Tokens that stay, as sorted indices int64 [H, M] into the stored tokens.

    layers, head: all heads of these layers (head None), or one head of one layer.
    share: the layer's budget in tokens per head, which its heads may divide unevenly.
    ends: how many first and newest tokens are known to be among those that stay.
    finite: of the scores that it was made by; a choice is worth nothing before `check_finite` has looked at it.
    """

    layers: tuple[int, ...]
    head: int | None
    index_HM: Tensor
    share: int = 0
    ends: tuple[int, int] = (0, 0)
    finite: Finite | None = None


def check_finite(choices: Iterable[Choice]) -> None:
    """ValueError where a scorer returned a score that is not finite. One look for many choices: it makes the host wait."""
    made = list({id(one.finite): one.finite for one in choices if one.finite is not None}.values())
    for finite, fine_L in zip(made, fetched([one.fine_L for one in made]), strict=True):
        if not bool(fine_L.all()):
            layer = finite.layers[int(fine_L.int().argmin())]
            raise ValueError(f"keep.scorer={finite.scorer} returned a score that is not finite in layer {layer}")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """A budget of tokens per layer and KV head: the first `sinks`, the newest `recent`, and the top scores between them.

    recent: null takes the scorer's default. layers, heads: how the budget is divided. Kept tokens stay in position order.

    Ties: of tokens with the same fp32 score the earlier ones stay, for every scorer, layer and head budget.
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
        """Statistics to record for the scorer and the layer budget."""
        return self.scorer.needs | getattr(self.layers, "needs", Needs())

    def protected(self, tokens: int) -> tuple[int, int]:
        """(sinks, recent) under a budget of `tokens`; UserError if the budget is smaller than their sum."""
        recent = self._recent(tokens)
        if tokens < 1 or tokens < self.sinks + recent:
            raise UserError(
                f"keep.budget.value={tokens} tokens is too small: sinks {self.sinks} + recent {recent} need at least "
                f"{max(self.sinks + recent, 1)}"
            )
        return self.sinks, recent

    def _recent(self, tokens: int) -> int:
        return max(self.scorer.default_recent(tokens, self.sinks) if self.recent is None else self.recent, 0)

    def divided(self, *, even: bool) -> str:
        """Name of the layer budget for the record; "uniform (asked: NAME)" if all layers got the same (`even`) nevertheless."""
        asked = type(self.layers).__name__.lower()
        return f"uniform (asked: {asked})" if even and asked != "uniform" else asked

    def choose(self, views: Sequence[LayerView], tokens: int) -> list[Choice]:
        """The kept tokens of every layer that holds more than its budget; layers without a Choice keep all.

        A view is of one layer, or of several that hold equally many tokens. Scorer and layer budget each get copies of the
        statistics in their own `needs`. Whether the scores were finite is still to be looked at: `check_finite`.
        """
        share, chosen = self._shares(views, tokens), list[Choice]()
        for view in views:
            alike: dict[int, list[int]] = {}
            for k, layer in enumerate(view.numbers):
                if view.n > share[layer]:
                    self._check_share(layer, share[layer], tokens)
                    alike.setdefault(share[layer], []).append(k)
            if not alike:
                continue
            scores_LHN = self._scores(view.seen_by(self.scorer.needs))
            for most, members in alike.items():  # layers with the same budget are sorted together
                whole = len(members) == len(scores_LHN)
                some_LHN = scores_LHN if whole else torch.stack([scores_LHN[k] for k in members])
                chosen += self._select([view.numbers[k] for k in members], some_LHN, most)
        return chosen

    def _shares(self, views: Sequence[LayerView], tokens: int) -> dict[int, int]:
        """The budget of every layer. Views of single layers are made only for a layer budget that may look at them."""
        if type(self.layers) is UniformLayers:
            return {layer: tokens for view in views for layer in view.numbers}
        needs = getattr(self.layers, "needs", Needs())
        singles = sorted((one.seen_by(needs) for view in views for one in view.layers), key=lambda one: one.layer)
        layers = self.layers.beyond(self.sinks + self._recent(tokens)) if hasattr(self.layers, "beyond") else self.layers
        return {one.layer: most for one, most in zip(singles, layers.split(tokens, singles), strict=True)}

    def _check_share(self, layer: int, most: int, tokens: int) -> None:
        """UserError if a layer's own budget is smaller than its sinks + recent."""
        try:
            self.protected(most)
        except UserError as error:
            if most == tokens:
                raise
            name = type(self.layers).__name__
            raise UserError(f"keep.layers={name} sets {most} tokens a head in layer {layer} (mean {tokens}): {error}") from None

    def _scores(self, view: LayerView) -> Tensor:
        """Scores [L, H, N] of the L layers of a view; ValueError if the scorer returns another shape."""
        name = type(self.scorer).__name__
        joint = vars(type(self.scorer)).get("joint", False)  # not inherited: a subclass may need single layers
        found = []
        for one in (view,) if joint and view.alike else view.layers:
            scores_HN = self.scorer.score(one)
            if scores_HN.shape != one.pos_HN.shape:
                expected, shape = tuple(one.pos_HN.shape), tuple(scores_HN.shape)
                raise ValueError(f"keep.scorer={name} returned scores of shape {shape}, not [H, N] = {expected}")
            scores_HN = scores_HN.float()
            found.append(scores_HN.mean(0, keepdim=True) if one.shared else scores_HN)
        scores_HN = found[0] if len(found) == 1 else torch.cat(found)
        scores_LHN: Tensor = scores_HN.unflatten(0, (len(view.layers), -1))  # type: ignore[no-untyped-call]
        return scores_LHN

    def _select(self, numbers: Sequence[int], scores_LHN: Tensor, tokens: int) -> list[Choice]:
        sinks, recent = self.protected(tokens)
        n = scores_LHN.shape[-1]
        stop = n - recent
        scores_LHM = scores_LHN[..., sinks:stop]
        layers, ends = tuple(numbers), (sinks, recent)
        fine_L = (scores_LHM - scores_LHM == 0).flatten(1).all(1)  # neither infinite nor not a number
        finite = Finite(type(self.scorer).__name__, layers, fine_L)
        free = tokens - sinks - recent
        counts = [self.heads.split(free, scores_HM, layer) for layer, scores_HM in zip(layers, scores_LHM, strict=True)]
        first, last = _places(0, sinks, scores_LHM.device), _places(stop, n, scores_LHM.device)

        def kept(middle: Tensor) -> Tensor:
            return torch.cat((first.expand(*middle.shape[:-1], -1), middle, last.expand(*middle.shape[:-1], -1)), -1)

        if len({count for layer in counts for count in layer}) == 1:
            count = counts[0][0]
            if count == stop - sinks - 1:  # as in every step of a cache at its budget
                index_LHM = all_but_lowest(scores_LHM, sinks, n)
            else:
                index_LHM = kept(highest(scores_LHM, count) + sinks)
            return [Choice(layers, None, index_LHM.flatten(0, 1), tokens, ends, finite)]
        order_LHM = _order(scores_LHM)
        return [
            Choice((layer,), h, kept(order_HM[h : h + 1, :count].sort(-1).values + sinks), tokens, ends, finite)
            for layer, order_HM, shares in zip(layers, order_LHM, counts, strict=True)
            for h, count in enumerate(shares)
        ]


def highest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of scores [..., M], int64 in rising order; of equal ones the earlier."""
    m = scores.shape[-1]
    return _order(scores)[..., :count].sort(-1).values if count != m - 1 else all_but_lowest(scores, 0, m)


def all_but_lowest(scores: Tensor, start: int, n: int) -> Tensor:
    """Indices of n - 1 of n tokens, int64 in rising order: one with the lowest of scores [..., M] goes, the last of equal ones.

    start: tokens before those that have scores. Sorting would cost more than attention does.
    """
    goes = start + scores.shape[-1] - 1 - scores.flip(-1).argmin(-1, keepdim=True)
    stay = _places(0, n - 1, scores.device)
    return stay + (stay >= goes)


def _order(scores: Tensor) -> Tensor:
    return scores.argsort(dim=-1, descending=True, stable=True)


@lru_cache(maxsize=32)
def _places(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start, stop, device=device)
