"""The single layers of a view of many, made when they are asked for: most stages treat all layers in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

View = TypeVar("View")


class SingleViews(Sequence[View], Generic[View]):
    """Views of the layers `numbers`, in this order; make: view k. alike: whether one call can score all of them."""

    def __init__(self, numbers: tuple[int, ...] = (), make: Callable[[int], View] | None = None, *, alike: bool = True) -> None:
        self.numbers, self.alike, self._make = numbers, alike, make
        self._made: dict[int, View] = {}

    def map(self, change: Callable[[View], View]) -> SingleViews[View]:
        """Each of them changed, once it is asked for."""
        return SingleViews(self.numbers, lambda k: change(self[k]), alike=self.alike)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, k: int) -> View: ...
    @overload
    def __getitem__(self, k: slice) -> list[View]: ...
    def __getitem__(self, k: int | slice) -> View | list[View]:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        k = range(len(self))[k]
        if k not in self._made:
            assert self._make is not None
            self._made[k] = self._make(k)
        return self._made[k]
