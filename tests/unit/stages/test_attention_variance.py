"""D2O's layer budgets equal their oracle, to the token."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from harness.errors import UserError
from harness.stages.layers.attention_variance import AttentionVariance, spread
from harness.stages.protocols import LayerView
from harness.stages.score.h2o import H2O
from harness.stages.stack import Stack
from tests.support.oracles import policies
from tests.support.views import HEADS, chosen, rule, tensors, view

TOKENS = 40


def layers(heads: tuple[int, int]) -> tuple[list[LayerView], list[float]]:
    """Four layers, and F of each by the oracle."""
    views, spreads = [], []
    for i in range(4):
        q, k, v = tensors(*heads, TOKENS, seed=i)
        views.append(view(q, k, v, layer=i))
        spreads.append(policies.attention_spread(q, k))
    return views, spreads


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_shares_are_the_oracles(heads: tuple[int, int]) -> None:
    views, spreads = layers(heads)
    assert heads[1] == 1 or len({round(x, 6) for x in spreads}) == 4, "layers differ"
    weights = [Fraction(math.exp(-x)) for x in spreads]
    for tokens, protected in ((12, 0), (17, 5), (20, 0)):
        found = AttentionVariance(protected=protected).split(tokens, views)
        each = tokens - protected
        shares = [4 * each * w / sum(weights) for w in weights]
        assert max(shares) + protected < TOKENS
        assert found == [n + protected for n in policies.whole(shares, 4 * each)]


def test_by_hand() -> None:
    """Variances 1, 2, 5: from 0 to 1 they are 0, 1/4, 1; a layer with one head has nothing to compare."""
    assert spread(torch.tensor([2.0, 1, 5])) == pytest.approx(1.25 / 3, abs=1e-6)
    assert spread(torch.tensor([7.0])) == 0


def test_what_a_layer_cannot_use_goes_to_the_others() -> None:
    views, spreads = layers((9, 3))
    first = spreads.index(min(spreads))
    found = AttentionVariance().split(TOKENS - 2, views)
    assert found[first] == TOKENS and sum(found) == 4 * (TOKENS - 2)


def test_recent_tokens_are_part_of_what_is_divided() -> None:
    """With protected=0, as keep=d2o has it, half of each layer's own budget after its sinks is recent."""
    views, _ = layers((4, 2))
    keep = rule(H2O(), sinks=4, layers=AttentionVariance(protected=0))
    kept = chosen(keep, views, 16)
    shares = AttentionVariance(protected=0).split(16, views)
    for heads, share in zip(kept, shares, strict=True):
        recent = (share - 4) // 2
        assert all(len(head) == share and head[:4] == [0, 1, 2, 3] for head in heads)
        assert all(head[share - recent :] == list(range(TOKENS - recent, TOKENS)) for head in heads)


def test_it_asks_for_the_sums_it_reads_and_runs_once() -> None:
    keep = rule(H2O(), layers=AttentionVariance())
    assert Stack(keep=keep).needs.column_sums
    with pytest.raises(UserError, match=r"keep\.layers=AttentionVariance runs in prefill"):
        Stack(keep=keep, phase="always")
    with pytest.raises(UserError, match=r"keep\.layers\.protected=-1"):
        AttentionVariance(protected=-1)
