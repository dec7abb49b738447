"""The single layers of a view of many are made when a stage asks for them, each once, and choosing does not depend on that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.stages.keep import Keep
from harness.stages.protocols import LayerView, Stats
from harness.stages.score.h2o import H2O
from harness.stages.score.knorm import KeyNorm
from harness.stages.score.tova import Tova
from harness.stages.single_views import SingleViews
from tests.support.views import rule, tensors, view

LAYERS = (2, 5, 7)


class Apart(KeyNorm):
    """Asks for its layers one by one, as a subclass of a joint scorer does."""


def layers() -> list[LayerView]:
    return [view(*tensors(4, 2, 40, seed=i), layer=i) for i in LAYERS]


def together(made: list[int]) -> LayerView:
    """The same layers in one view; made: the numbers of those that were asked for."""
    all_of_them = layers()

    def make(k: int) -> LayerView:
        made.append(LAYERS[k])
        return all_of_them[k]

    first = all_of_them[0]
    return replace(
        first,
        pos_HN=torch.cat([one.pos_HN for one in all_of_them]),
        stats=Stats.join([one.stats for one in all_of_them]),
        read_keys=lambda: torch.cat([one.k_HND for one in all_of_them]),
        read_values=lambda: torch.cat([one.v_HND for one in all_of_them]),
        each=SingleViews(LAYERS, make),
    )


def test_each_is_made_once_when_it_is_asked_for() -> None:
    made: list[int] = []
    views = SingleViews(LAYERS, lambda k: made.append(k) or LAYERS[k])  # type: ignore[func-returns-value]
    doubled = views.map(lambda x: 2 * x)
    assert (len(doubled), doubled.numbers, made) == (3, LAYERS, [])
    assert (doubled[-1], doubled[2], made) == (14, 14, [2])
    assert list(doubled) == [4, 10, 14] and doubled[:2] == [4, 10] and made == [2, 0, 1]
    with pytest.raises(IndexError):
        views[3]
    assert not SingleViews() and SingleViews().alike


@pytest.mark.parametrize(("scorer", "asked"), [(H2O(), []), (Tova(), []), (KeyNorm(), []), (Apart(), list(LAYERS))], ids=repr)
def test_what_stays_is_the_same_and_joint_scorers_ask_for_no_single_layer(scorer: H2O, asked: list[int]) -> None:
    made: list[int] = []
    keep: Keep = rule(scorer, sinks=2, recent=3)
    (joint,) = keep.choose([together(made)], 12)
    assert made == asked and joint.layers == LAYERS
    apart = keep.choose(layers(), 12)
    assert torch.equal(joint.index_HM, torch.cat([one.index_HM for one in apart]))
