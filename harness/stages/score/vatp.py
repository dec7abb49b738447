"""Heavy hitters weighted by their values; it knows nothing of which rows are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class Vatp(Scorer):
    """Value-aware token pruning (arXiv 2406.12335), its H2O variant: accumulated attention times the L1 norm of the value.

    The sums are those of H2O: over all queries so far, mean over a query group, kept in the store (and counted) in every
    phase but `prefill`. Sinks have large sums and small values: the paper protects them, so should `keep.sinks`.
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
