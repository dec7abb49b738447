"""What one forward of a batch is: the sequences' stores, what attention shares between layers, what it records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.kv.head_group import Slot
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.kv.teams import Team
from harness.stages.protocols import Needs, Stats

Store = Mapping[int, Sequence[Slot]]
"""What one row stores: for each layer, its parts in the order of their heads (none before the first token)."""


@dataclass
class Forward:
    """One forward of B rows: what each row has stored, how many of its L query tokens are real, what to record.

    After the forward, `new` holds the new K and V of all rows, one pair of tensors [B, layers, H, L, D] in the cache dtype for
    each group of layers, and `stats` what was recorded, as [layer][row].
    """

    shape: ModelShape
    groups: Sequence[tuple[int, ...]]  # layers whose new rows lie in one tensor
    stores: Sequence[Store]
    seen: Sequence[int]
    lengths: Sequence[int]
    needs: Sequence[Needs]
    kv_dtype: torch.dtype
    ropes: Sequence[LayerRope | None] = ()
    starts: Sequence[int] | None = None  # position of each row's first new token; None: as many as it has seen
    unrotated: Sequence[bool] | None = None  # rows whose stored keys wait to be rotated to their place in the cache
    teams: Sequence[Team] | None = None  # rows that attend in one call, in order; None: those that are alike in a layer
    reference: Sequence[int] | None = None  # for every row, the row whose attention output it is compared with
    errors: dict[int, Tensor] = field(default_factory=dict)  # of a layer, [B, 2]: |out - ref|^2, |ref|^2
    new: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    both: dict[int, Tensor] = field(default_factory=dict)  # the same pairs as one tensor [2, ...], where they are one
    stats: dict[int, list[Stats]] = field(default_factory=dict)
    masks: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)
    picks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # of a layer: its group, and where it stands there
    dtype: torch.dtype = torch.float32  # what attention computes in, as it was met

    def __post_init__(self) -> None:
        self.places = {layer: (g, at) for g, group in enumerate(self.groups) for at, layer in enumerate(group)}

    def keep_new(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a layer's new rows [B, H, L, D], rounded to the cache dtype, beside those of its group; returns what is kept."""
        group, at = self.places[layer]
        if group not in self.new:
            b, *rest = key.shape
            size = (b, len(self.groups[group]), *rest[:-1])
            if self.teams is not None and key.shape == value.shape:  # views take both in one go
                self.both[group] = torch.empty(2, *size, key.shape[-1], dtype=self.kv_dtype, device=key.device)
                self.new[group] = (self.both[group][0], self.both[group][1])
            else:
                both = (torch.empty(*size, x.shape[-1], dtype=self.kv_dtype, device=x.device) for x in (key, value))
                self.new[group] = (next(both), next(both))
        for buffer, x in zip(self.new[group], (key, value), strict=True):
            buffer[:, at] = x
        self.dtype = key.dtype
        if key.dtype == self.kv_dtype:
            return key, value
        k, v = self.new[group]
        return k[:, at], v[:, at]

    def rows(self, group: int, row: int) -> tuple[Tensor, Tensor]:
        """A row's new K and V of a group's layers, [layers * H, L, D] with its own L; a view where it can be one."""
        n = self.lengths[row]
        k, v = (x[row, :, :, :n].flatten(0, 1) for x in self.new[group])
        return k, v

    def start(self, row: int) -> int:
        """Position of a row's first new token."""
        return self.seen[row] if self.starts is None else self.starts[row]

    def is_unrotated(self, row: int) -> bool:
        """Whether the row's keys are stored without rotation."""
        return self.unrotated is not None and self.unrotated[row]

    def mask(self, past: int, length: int, window: int | None) -> Tensor | None:
        """Bool mask [1, 1, L, past + L] of the causal and sliding-window rule; None where sdpa needs none.

        Stored rows of a full layer are all older than the queries, so only a window looks at positions; sliding layers
        keep their newest rows, which are contiguous.
        """
        key = (past, length, window)
        if key not in self.masks:
            query = torch.arange(past, past + length)[:, None]
            row = torch.arange(past + length)[None]
            allowed = row <= query
            slides = window is not None and past + length >= window  # stock hands sdpa a mask from here on
            if slides:
                allowed &= row > query - int(window or 0)
            plain = not slides and (length == 1 or past == 0)
            self.masks[key] = None if plain else allowed[None, None]
        return self.masks[key]

    def alike(self, layer: int) -> list[Team]:
        """Batch rows whose stores have the same shape in a layer, and as many new tokens: they attend in one call."""
        if self.teams is not None:
            return list(self.teams)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row, n in enumerate(self.lengths):
            shape = tuple((s.heads.start, s.heads.stop, s.head_group.n) for s in self.stores[row].get(layer, ()))
            groups.setdefault((n, *shape), []).append(row)
        return [Team([], rows) for rows in groups.values()]

    def positions(self, start: int, n: int, device: torch.device) -> Tensor:
        """int32 start, start + 1 .. of n tokens; many rows stand at the same place."""
        key = ("positions", start, n, device)
        if key not in self.picks:
            self.picks[key] = torch.arange(start, start + n, dtype=torch.int32, device=device)
        return self.picks[key]

    def pick(self, x: Tensor, rows: list[int]) -> Tensor:
        """The batch rows `rows` of x; a view where they follow one another."""
        if rows[-1] - rows[0] == len(rows) - 1:  # always in rising order
            return x[rows[0] : rows[0] + len(rows)]
        key = (*rows, x.device)
        if key not in self.picks:
            self.picks[key] = torch.tensor(rows, device=x.device)
        return x.index_select(0, self.picks[key])


CURRENT: ContextVar[Forward] = ContextVar("kv_harness_forward")
