"""Comparison of kept sets with those of an oracle; it knows no model.

fp32 and exact scores may order two tokens differently only when their scores agree to within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from harness.stages.keep import Keep, check_finite
from harness.stages.protocols import LayerView

NOISE = 2e-5  # relative to the largest score: fp32 sums of up to a thousand weights


def same_tokens(found: Sequence[int], wanted: Sequence[int], scores: Sequence[float]) -> int:
    """Assert equal kept sets but for swaps within rounding; returns how many tokens were swapped."""
    assert list(found) == sorted(set(found))
    assert len(found) == len(wanted)
    added, dropped = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
    if added:
        worst = max(scores[i] for i in dropped) - min(scores[i] for i in added)
        assert worst <= NOISE * max(map(abs, scores)), (added, dropped, worst)
    return len(added)


def kept_tokens(keep: Keep, views: Sequence[LayerView], tokens: int) -> list[list[Tensor] | None]:
    """For each one-layer view the kept token indices: one [H, M] when all heads keep as many, else one [1, M] a head.

    None where everything stays.
    """
    found: dict[int, list[Tensor]] = {}
    distinct = len({view.layer for view in views}) == len(views)
    numbered = list(views) if distinct else [replace(view, layer=i) for i, view in enumerate(views)]
    chosen = keep.choose(numbered, tokens)
    check_finite(chosen)
    for choice in chosen:
        split = choice.index_HM.chunk(len(choice.layers))
        for layer, index in zip(choice.layers, split, strict=True):
            found.setdefault(layer, []).append(index)
    return [found.get(view.layer) for view in numbered]
