"""TOVA: attention of the newest query, one kept set for all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class Tova(Scorer):
    """TOVA (arXiv 2401.06104; kvpress: TOVAPress, which protects the newest token and runs after prefill only).

    score_j = mean over all query heads of the layer of the last query's attention weight on j, the same for every KV head.
    As in the paper no token is protected, not even the newest.
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
