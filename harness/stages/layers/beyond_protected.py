"""What layer budgets have in common that divide the tokens beyond those which every layer keeps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from harness.errors import require
from harness.stages.apportion import apportion, filled
from harness.stages.protocols import LayerBudget, LayerView


@dataclass(frozen=True, kw_only=True)
class BeyondProtected(LayerBudget):
    """protected: tokens that every layer keeps besides its share; null takes sinks + recent of the keep."""

    protected: int | None = None

    def __post_init__(self) -> None:
        ok = self.protected is None or (isinstance(self.protected, int) and self.protected >= 0)
        require(ok, "keep.layers.protected", self.protected, "a number of tokens, 0 or more, or null for sinks + recent")

    def beyond(self, protected: int) -> LayerBudget:
        return self if self.protected is not None else replace(self, protected=protected)


@dataclass(frozen=True, kw_only=True)
class Weighted(BeyondProtected):
    """In proportion to weights that the attention of the prompt gives layers, set once, after the prompt.

    With B = tokens - protected and n layers: budget_l = protected + least * B + (1 - least) * n * B * weight_l / sum(weight).
    A layer gets at most the tokens it holds; the excess goes to the other layers. Rounded so that the mean stays `tokens`.
    """

    spends_all: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill",)

    @property
    def least(self) -> Fraction:
        """The share of B that every layer gets whatever its weight."""
        return Fraction(0)

    @abstractmethod
    def weights(self, views: Sequence[LayerView]) -> list[Fraction]:
        """One for each layer, 0 or more."""

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        protected = self.protected or 0
        each = tokens - protected
        if each < 1 or any(view.n <= tokens for view in views):
            return [tokens] * len(views)
        own = self.least * each
        room = [view.n - protected - own for view in views]
        extra = filled(room, self.weights(views), (each - own) * len(views))
        return [share + protected for share in apportion([own + x for x in extra], len(views) * each)]
