"""Recurrent and convolution states: what layers with linear attention hold beside, or instead of, keys and values.

Their size is constant. A forward changes them in place, and what a token did to them cannot be taken back: every forward gets
copies, and only a sequence's own tokens may be fed to them. transformers keeps them in cache layers of one kind
(`conv_states`, `recurrent_states`), MiniMax in a list of its own; which tensors there are is read off a cache that was filled.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from harness.kv.compat import EntryCache

NAMES = ("conv_states", "recurrent_states")  # attributes of a cache layer: a tensor [B, ...], or some by number
LISTED = "linear_cache"  # attribute of MiniMax's cache: a tensor [B, ...] for each layer that has one

Home = tuple[MutableMapping[Any, Any] | MutableSequence[Any], Any]  # a container and a key: where a state is found


@dataclass(frozen=True)
class States:
    """The states of one sequence: for each shape, dtype and device one tensor [states, ...], in the order of the layers."""

    held: tuple[Tensor, ...] = ()


def fed_together(
    lengths: Sequence[int], states: Sequence[States | None], reference: Sequence[int] | None = None, *, alone: bool
) -> list[list[int]]:
    """The rows of a batch that are fed in one forward.

    They have equally many new tokens, as a state would take in what fills up a shorter row, and those that have seen nothing
    yet are apart from others. alone: every row by itself, those that others are compared with (reference) first.
    """
    rows = range(len(lengths))
    if alone:
        return [[row] for row in sorted(rows, key=lambda row: reference is not None and reference[row] != row)]
    groups: dict[tuple[int, bool], list[int]] = {}
    for row in rows:
        groups.setdefault((lengths[row], states[row] is None), []).append(row)
    return list(groups.values())


class Entrance:
    """Makes the cache that transformers sees in a forward, with the states of the batch in it, and takes them out again.

    hybrid: whether some of the model's layers have states. Without any, one cache is enough for all forwards. entry: its class.
    """

    def __init__(self, model: PreTrainedModel, layers: int, *, hybrid: bool, entry: type[EntryCache] = EntryCache) -> None:
        self.hybrid, self._class = hybrid, _of_family(model, entry) if hybrid else entry
        self._blank = self._cache(DynamicCache(config=model.config).layers if hybrid else layers)
        self._filled: Cache | None = None  # one as a first forward leaves it, for every forward after a first one
        self._homes: list[list[Home]] = []  # where its states are found
        self._opened: list[tuple[Tensor, Sequence[Tensor]]] = []  # what was put there, [states, B, ...], and each of them

    def open(self, rows: Sequence[States | None]) -> Cache:
        """A cache for sequences that have all seen something, or all nothing (None); to be closed before the next one opens."""
        if not self.hybrid:
            return self._blank
        if rows[0] is None:
            return self._copy(self._blank)
        assert self._filled is not None
        together = [torch.stack(tensors, 1) for tensors in zip(*(row.held for row in rows if row is not None), strict=True)]
        self._opened = [(x, x.unbind(0)) for x in together]
        for homes, (_, states) in zip(self._homes, self._opened, strict=True):
            for (container, key), x in zip(homes, states, strict=True):
                container[key] = x
        return self._filled

    def close(self, cache: Cache, rows: int) -> list[States]:
        """The states of each sequence after a forward, in storages of their own."""
        if not self.hybrid:
            return [States()] * rows
        found, opened = (self._homes, self._opened) if cache is self._filled else (_homes(cache), [])
        states = [[container[key] for container, key in homes] for homes in found]
        together = [_together(*one) for one in zip_longest(states, opened)]
        self._opened = []
        if self._filled is None:
            self._filled, self._homes = cache, found
        for container, key in (home for homes in found for home in homes):
            container[key] = None  # states are the sequences' alone
        if rows == 1:
            return [States(tuple(x[:, 0] for x in together))]
        return [States(tuple(x[:, row].clone() for x in together)) for row in range(rows)]

    def _cache(self, layers: int | list[Any]) -> Cache:
        cache = self._class(layers)
        if hasattr(self._class, f"get_{LISTED}"):
            setattr(cache, LISTED, [None] * len(cache.layers))
        return cache

    def _copy(self, cache: Cache) -> Cache:
        """The same states in containers of their own."""
        copied = self._cache([copy.copy(layer) for layer in cache.layers])
        for layer in copied.layers:
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(layer, name, dict(value))
        if hasattr(cache, LISTED):
            setattr(copied, LISTED, list(getattr(cache, LISTED)))
        return copied


def _of_family(model: PreTrainedModel, entry: type[EntryCache]) -> type[EntryCache]:
    """The class of the cache, as one that the model takes for its own, where it insists on that."""
    module = vars(sys.modules[type(model.get_decoder()).__module__])
    own = [x for x in module.values() if isinstance(x, type) and issubclass(x, Cache) and hasattr(x, f"get_{LISTED}")]
    return cast("type[EntryCache]", type(entry.__name__, (entry, *own), {})) if own else entry


def _homes(cache: Cache) -> list[list[Home]]:
    """Where the states of a filled cache are found, those of one shape, dtype and device together."""
    alike: dict[object, list[Home]] = {}
    for container, key in _all_homes(cache):
        x = container[key]
        alike.setdefault((x.shape[1:], x.dtype, x.device), []).append((container, key))
    return list(alike.values())


def _all_homes(cache: Cache) -> Iterator[Home]:
    for layer in cache.layers:
        for name in NAMES:
            value = getattr(layer, name, None)
            if isinstance(value, Tensor):
                yield vars(layer), name
            elif value is not None:
                yield from ((value, key) for key, x in value.items() if isinstance(x, Tensor))
    listed = getattr(cache, LISTED, [])
    yield from ((listed, at) for at, x in enumerate(listed) if isinstance(x, Tensor))


def _together(states: list[Tensor], opened: tuple[Tensor, Sequence[Tensor]] | None) -> Tensor:
    """States [B, ...] of one shape as [states, B, ...]; no copy where they are those that were put there, changed in place."""
    if opened is not None and all(x is put for x, put in zip(states, opened[1], strict=True)):
        return opened[0]
    return torch.stack(states)
