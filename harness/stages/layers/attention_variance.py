"""D2O's layer budgets: layers whose attention is spread evenly keep more tokens than those with a few heavy ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from harness.stages.layers.beyond_protected import Weighted
from harness.stages.protocols import LayerView, Needs
from harness.stages.transfers import fetched

TINY = 1e-6  # added to a range that is divided by, as in the authors' code


@dataclass(frozen=True, kw_only=True)
class AttentionVariance(Weighted):
    """D2O's dynamic allocation (arXiv 2406.13035; kvpress: none), from the attention of the prompt.

    A token's sum is the attention that all queries of the prompt gave it. F_l is the variance of these sums over the tokens of
    a KV head, brought to 0 .. 1 over the heads of layer l ((x - min) / (max - min)), then their mean. With B = tokens -
    protected and n layers: budget_l = protected + n * B * exp(-F_l) / sum(exp(-F)).
    A layer gets at most the tokens it holds; the excess goes to the other layers. Rounded so that the mean stays `tokens`.

    The paper writes exp(-F) of the variance itself, which grows with the text, so that one layer would get everything; the
    range over heads is the authors' code. A layer with one KV head has F = 0. Differs from that code: sums are means over a
    query group; no layer stays whole, where theirs leaves the first two and the last one alone, beyond the budget; and the
    excess of a full layer is not lost. Budgets are set once, after the prompt, and so is what they are spent on.

    protected: as in Pyramid; 0 divides all of the budget, recent tokens included, as in the paper.
    """

    @property
    def needs(self) -> Needs:
        return Needs(column_sums=True)

    def weights(self, views: Sequence[LayerView]) -> list[Fraction]:
        return [Fraction(math.exp(-spread(one))) for one in fetched([_variances(view) for view in views])]


def spread(variances_H: Tensor) -> float:
    """F of a layer: the mean of its heads' variances, in units of their range above the least."""
    least, most = (float(x) for x in variances_H.aminmax())
    return sum((float(x) - least) / (most - least + TINY) for x in variances_H) / len(variances_H)


def _variances(view: LayerView) -> Tensor:
    """Of the sums of every KV head, [H] fp32."""
    assert view.stats.column_sums_HN is not None
    found: Tensor = view.stats.column_sums_HN.var(dim=-1)
    return found
