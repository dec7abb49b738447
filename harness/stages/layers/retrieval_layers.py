"""Rows for the layers whose KV heads retrieve; it knows nothing of scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from harness.errors import UserError, require
from harness.stages.apportion import apportion
from harness.stages.heads.retrieval_split import RetrievalHeads
from harness.stages.protocols import LayerBudget, LayerView


@dataclass(frozen=True, kw_only=True)
class RetrievalLayers(LayerBudget):
    """Goes with RetrievalHeads: every retrieval head of the model gets as many rows, so a layer gets what its heads need.

    A layer's share beyond its protected rows is in proportion to its number of retrieval heads; rounded to whole rows a layer,
    so that heads may differ by a few. Once retrieval heads keep everything, the rest of the budget is not spent.

    heads, file: the same list as in `keep.heads`. protected: as in Pyramid; the keep's `recent` must be a number, not all.
    """

    heads: Sequence[Sequence[int]] | None = None
    file: str | None = None
    protected: int | None = None
    _heads: RetrievalHeads = field(init=False, repr=False, compare=False, default_factory=RetrievalHeads)

    def __post_init__(self) -> None:
        ok = self.protected is None or (isinstance(self.protected, int) and self.protected >= 0)
        require(ok, "keep.layers.protected", self.protected, "a number of tokens, 0 or more, or null for sinks + recent")
        object.__setattr__(self, "_heads", RetrievalHeads(heads=self.heads, file=self.file))

    def beyond(self, protected: int) -> LayerBudget:
        return self if self.protected is not None else replace(self, protected=protected)

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        protected = self.protected or 0
        heads = [int(view.pos_HN.shape[0]) for view in views]
        counts = [len(self._heads.of_layer(view.layer, h)) for view, h in zip(views, heads, strict=True)]
        self._check_layers(views)
        if tokens < protected or not sum(counts) or all(view.n <= tokens for view in views):
            return [tokens] * len(views)
        each = Fraction((tokens - protected) * sum(heads), sum(counts))  # rows of a retrieval head
        shares = [
            min(each, Fraction(view.n - protected)) * count / h for view, count, h in zip(views, counts, heads, strict=True)
        ]
        whole = int(sum(shares))
        return [share + protected for share in apportion([s * whole / (sum(shares) or 1) for s in shares], whole)]

    def _check_layers(self, views: Sequence[LayerView]) -> None:
        unknown = sorted(self._heads.layers - {view.layer for view in views})
        if unknown:
            raise UserError(
                f"keep.layers names heads of layer {unknown[0]}, which is not a layer of this model that can be compressed: "
                "python -m harness.calibrate.retrieval_heads makes a list"
            )
