"""The single layers of a view of many, made when they are asked for: most stages treat all layers in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

View = TypeVar("View")


class SingleViews(Generic[View]):
    """Views of the layers `numbers`, in this order; make: view k. alike: whether one call can score all of them."""

    def __init__(self, numbers: tuple[int, ...], make: Callable[[int], View], *, alike: bool) -> None:
        self.numbers, self.alike, self._make = numbers, alike, make
        self._made: dict[int, View] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, k: int) -> View:
        if not 0 <= k < len(self.numbers):
            raise IndexError(k)
        if k not in self._made:
            self._made[k] = self._make(k)
        return self._made[k]

    def __iter__(self) -> Iterator[View]:
        return (self[k] for k in range(len(self.numbers)))
