"""VATP: accumulated attention weighted by the size of the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class Vatp(Scorer):
    """Value-aware token pruning (arXiv 2406.12335; kvpress: none), the paper's H2O variant.

    score_j = S_j * ||v_j||_1, with S_j the accumulated attention of H2O, stored and counted as there.

    Sinks have large S and small values: the paper protects them, so set `keep.sinks` above 0.
    """

    keeps_state: ClassVar[bool] = True
    joint: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked", "always", "every_n")

    @property
    def needs(self) -> Needs:
        return Needs(column_sums=True)

    def score(self, view: LayerView) -> Tensor:
        assert view.stats.column_sums_HN is not None
        norms_HN: Tensor = torch.linalg.vector_norm(view.v_HND, ord=1, dim=-1)
        return view.stats.column_sums_HN * norms_HN
