"""Rows that the newest query looks at, the same for all heads of a layer; it knows nothing of which rows are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class Tova(Scorer):
    """TOVA (arXiv 2401.06104): the last query's attention, averaged over all query heads; one kept set per layer.

    As in the paper no row is protected by its age, the newest one included.
    """

    joint: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(queries=1)

    def score(self, view: LayerView) -> Tensor:
        weights_HN = view.window_attention(1)[:, 0]
        weights_LHN = weights_HN.unflatten(0, (len(view.layers), -1))  # type: ignore[no-untyped-call]
        mean_LHN: Tensor = weights_LHN.mean(1, keepdim=True).expand_as(weights_LHN)
        return mean_LHN.flatten(0, 1)

    def default_recent(self, tokens: int, sinks: int) -> int:
        return 0
