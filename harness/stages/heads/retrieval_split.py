"""DuoAttention: the budget goes to retrieval heads, streaming heads keep sinks and recent tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from harness.errors import UserError
from harness.stages.apportion import apportion
from harness.stages.heads.head_list import head_list
from harness.stages.protocols import HeadBudget


@dataclass(frozen=True, kw_only=True)
class RetrievalHeads(HeadBudget):
    """DuoAttention's pattern (arXiv 2410.10819; kvpress: DuoAttentionPress).

    n_i = min(H * tokens, m * r) / r unprotected tokens for each of the layer's r retrieval heads (m unprotected tokens are
    there), and 0 for the others, which keep sinks and recent tokens only.

    Differs from the paper: its retrieval heads keep everything, here they do once the budget allows it; its heads are found by
    training gates, ours by attention (`python -m harness.calibrate.retrieval_heads`).

    heads, file: retrieval heads as [layer, KV head] pairs, here or under "heads" in a JSON file. Without either, the first half
        of each layer's heads (rounded up) is used: a placebo to compare a calibrated list with, not DuoAttention.
    """

    by_shape: ClassVar[bool] = True

    heads: Sequence[Sequence[int]] | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        _ = self._chosen  # a wrong list is refused before a model is loaded

    @cached_property
    def _chosen(self) -> frozenset[tuple[int, int]] | None:
        return head_list("keep.heads", self.heads, self.file)

    def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
        h, m = scores_HM.shape
        chosen = self.of_layer(layer, h)
        if not chosen:
            return [0] * h
        total = min(h * tokens, m * len(chosen))
        counts = dict(zip(chosen, apportion([Fraction(total, len(chosen))] * len(chosen), total), strict=True))
        return [counts.get(head, 0) for head in range(h)]

    @property
    def layers(self) -> frozenset[int]:
        """Layers that the list names."""
        return frozenset(layer for layer, _ in self._chosen or ())

    def of_layer(self, layer: int, h: int) -> list[int]:
        """Retrieval heads of a layer of `h` KV heads, sorted; UserError when the list names a head that it lacks."""
        if self._chosen is None:
            return list(range((h + 1) // 2))
        found = sorted(head for at, head in self._chosen if at == layer)
        if found and found[-1] >= h:
            raise UserError(
                f"keep.heads names KV head {found[-1]} of layer {layer}, which has {h}: the list is another model's; "
                "python -m harness.calibrate.retrieval_heads makes one"
            )
        return found
