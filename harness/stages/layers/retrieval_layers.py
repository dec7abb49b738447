"""Layer budgets in proportion to the number of retrieval heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from harness.errors import UserError, require
from harness.stages.apportion import apportion
from harness.stages.heads.retrieval_split import RetrievalHeads
from harness.stages.protocols import LayerBudget, LayerView


@dataclass(frozen=True, kw_only=True)
class RetrievalLayers(LayerBudget):
    """The layer budget that goes with RetrievalHeads: all retrieval heads of the model keep equally many tokens.

    With B = tokens - protected, h KV heads a layer, r_l retrieval heads in layer l and n_l tokens held:
    budget_l = protected + min(B * sum(h) / sum(r), n_l - protected) * r_l / h. Rounded to whole tokens a layer, so heads of
    different layers may differ by a few. Once the retrieval heads keep everything, the rest of the budget is not spent.

    DuoAttention (arXiv 2410.10819) has no budget: its retrieval heads keep everything.

    heads, file: the same list as in `keep.heads`. protected: as in Pyramid; `keep.recent` must be smaller than the budget.
    """

    by_shape: ClassVar[bool] = True

    heads: Sequence[Sequence[int]] | None = None
    file: str | None = None
    protected: int | None = None

    def __post_init__(self) -> None:
        ok = self.protected is None or (isinstance(self.protected, int) and self.protected >= 0)
        require(ok, "keep.layers.protected", self.protected, "a number of tokens, 0 or more, or null for sinks + recent")
        _ = self._heads  # a wrong list is refused before a model is loaded

    @cached_property
    def _heads(self) -> RetrievalHeads:
        return RetrievalHeads(heads=self.heads, file=self.file)

    def beyond(self, protected: int) -> LayerBudget:
        return self if self.protected is not None else replace(self, protected=protected)

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        protected = self.protected or 0
        heads = [int(view.pos_HN.shape[0]) for view in views]
        counts = [len(self._heads.of_layer(view.layer, h)) for view, h in zip(views, heads, strict=True)]
        self._check_layers(views)
        if tokens < protected or not sum(counts) or all(view.n <= tokens for view in views):
            return [tokens] * len(views)
        each = Fraction((tokens - protected) * sum(heads), sum(counts))  # tokens of a retrieval head
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
