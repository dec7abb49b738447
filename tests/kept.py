"""Comparison of kept sets with those of an oracle; it knows no model.

fp32 and exact scores may order two rows differently only when their scores agree to within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

NOISE = 2e-5  # relative to the largest score: fp32 sums of up to a thousand weights


def same_rows(found: Sequence[int], wanted: Sequence[int], scores: Sequence[float]) -> int:
    """Assert equal kept sets but for swaps within rounding; returns how many rows were swapped."""
    assert list(found) == sorted(set(found))
    assert len(found) == len(wanted)
    added, dropped = sorted(set(found) - set(wanted)), sorted(set(wanted) - set(found))
    if added:
        worst = max(scores[i] for i in dropped) - min(scores[i] for i in added)
        assert worst <= NOISE * max(map(abs, scores)), (added, dropped, worst)
    return len(added)
