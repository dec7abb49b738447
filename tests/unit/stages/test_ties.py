"""Ties: of rows whose computed scores are the same number the earlier ones stay, for every scorer, layer and split over heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.stages.heads.adakv import AdaKV
from harness.stages.keep import Keep, highest
from harness.stages.protocols import LayerView, Needs, Scorer
from harness.stages.score.knorm import KeyNorm
from tests.support import conf_tree, views

TOKENS = 60


@dataclass(frozen=True)
class Coarse(Scorer):
    """Another scorer's scores, told apart in three steps only."""

    inner: Scorer

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    def score(self, view: LayerView) -> Tensor:
        scores = self.inner.score(view)
        low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
        return ((scores - low) / (high - low) * 3).round()

    def default_recent(self, tokens: int, sinks: int) -> int:
        return self.inner.default_recent(tokens, sinks)


def whole(seed: int = 0) -> LayerView:
    return views.view(*views.tensors(4, 2, TOKENS, seed))


def best(scores_N: list[float], rows: range, count: int) -> list[int]:
    """The rule: higher scores first, of equal ones the earlier row."""
    return sorted(rows, key=lambda i: (-scores_N[i], i))[:count]


@pytest.mark.parametrize("name", conf_tree.members("keep"))
def test_of_equal_scores_the_earlier_rows_stay(name: str) -> None:
    member, tokens = conf_tree.keep(name, 44), 44
    keep = Keep(scorer=Coarse(member.scorer), budget=member.budget, sinks=member.sinks, recent=8)
    view = whole()
    scores = Coarse(member.scorer).score(view).tolist()
    first, middle, last = range(member.sinks), range(member.sinks, TOKENS - 8), range(TOKENS - 8, TOKENS)
    wanted = [sorted([*first, *best(one, middle, tokens - len(first) - 8), *last]) for one in scores]
    assert views.chosen(keep, [view], tokens) == [wanted]


@pytest.mark.parametrize("scores", [lambda view: torch.zeros_like(view.pos_HN), lambda view: -(view.pos_HN // 30).double()])
@pytest.mark.parametrize("heads", [{}, {"heads": AdaKV()}])
def test_rows_that_are_all_alike_go_from_the_newest_on(scores: Any, heads: dict[str, Any]) -> None:
    @dataclass(frozen=True)
    class Same(KeyNorm):
        def score(self, view: LayerView) -> Tensor:
            return scores(view)  # type: ignore[no-any-return]

    keep = views.rule(Same(), sinks=2, recent=3, **heads)
    for one in views.chosen(keep, [whole()], 20)[0]:
        assert one == [*range(len(one) - 3), 57, 58, 59]


def test_scores_that_differ_beyond_fp32_are_equal() -> None:
    @dataclass(frozen=True)
    class Fine(KeyNorm):
        def score(self, view: LayerView) -> Tensor:
            return 1 + view.pos_HN.double() * 1e-12

    assert views.chosen(views.rule(Fine(), recent=0), [whole()], 10) == [[list(range(10))] * 2]


@pytest.mark.parametrize("goes", [0, 1, 2, 30, TOKENS])
def test_the_highest_are_those_of_the_rule_however_many_go(goes: int) -> None:
    drawn = torch.randint(-2, 3, (3, 2, TOKENS), generator=torch.Generator().manual_seed(goes)).float()
    scores = torch.cat((drawn, torch.zeros(1, 2, TOKENS), -0.0 * drawn[:1]))  # zeros of either sign are equal
    wanted = [[sorted(best(one, range(TOKENS), TOKENS - goes)) for one in layer] for layer in scores.tolist()]
    assert highest(scores, TOKENS - goes).tolist() == wanted
