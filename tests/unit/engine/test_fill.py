"""Batches keep the order of what they are filled with and stay under the limit, whatever an item adds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from harness.engine.batches import MOST_TOGETHER, fill


def added(item: tuple[str, int], wave: Sequence[tuple[str, int]]) -> int:
    """An item's own size, and 10 for the first of its document."""
    return item[1] + (0 if any(item[0] == other[0] for other in wave) else 10)


@pytest.mark.parametrize("limit", [50, 70, 400, 4000])
@pytest.mark.parametrize("n", [0, 1, 2, 150])
def test_batches_are_whole_ordered_and_as_full_as_they_can_be(n: int, limit: int) -> None:
    draw = random.Random(n)
    items = [(draw.choice("abc"), draw.randint(1, 40)) for _ in range(n)]
    waves = list(fill(items, added, limit))
    assert [item for wave in waves for item in wave] == items
    for wave, after in zip(waves, [*waves[1:], None][: len(waves)], strict=True):
        total = sum(added(item, wave[:i]) for i, item in enumerate(wave))
        assert 0 < len(wave) <= MOST_TOGETHER and total <= limit
        assert after is None or len(wave) == MOST_TOGETHER or total + added(after[0], wave) > limit
