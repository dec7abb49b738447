"""Sequences of a batch that attend in one call, and the decoded copy of their stores that is kept between forwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from harness.stages.transfers import numbers

ROOM = 64  # tokens that a view can grow by before it is copied into a larger one


class Span(NamedTuple):
    """K and V of one layer, [R, H, N + L, D], and where their L newest tokens lie: [2, R, H, L, D], or two of [1, ...]."""

    keys: Tensor
    values: Tensor
    places: Sequence[Tensor]


@dataclass(eq=False)
class Views:
    """Decoded K and V of a team in one group of layers.

    stored: one tensor [2, layers, R, H, room, D], or where keys and values differ in width one [1, ...] each. spare: takes what
    stays when tokens are evicted, and then changes places with it. start: where the tokens begin; those before it have left a
    sliding window.
    """

    layers: tuple[int, ...]
    stored: list[Tensor]
    spare: Tensor | None
    start: int = 0
    _cut: Mapping[tuple[int, int, int], Sequence[Span]] = field(default_factory=dict)  # of all layers, for the step that is fed

    def span(self, at: int, n: int, length: int, *, alike: bool) -> Span:
        """What one of its layers holds, n tokens, and `length` places behind them.

        alike: all layers hold as many, and are cut together.
        """
        if not alike:
            return _spans([x.narrow(1, at, 1) for x in self.stored], self.start, n, length)[0]
        key = self.start, n, length
        if key not in self._cut:
            self._cut = {key: _spans(self.stored, *key)}
        return self._cut[key][at]

    def free(self, n: int, length: int) -> list[Tensor]:
        """The places [2, layers, R, H, length, D], or two of [1, ...], behind n tokens of every layer."""
        return _tokens(self.stored, self.start + n, length)

    @property
    def both(self) -> list[Tensor]:
        """K and V, [layers, R, H, room, D]."""
        return [one for x in self.stored for one in x.unbind(0)]

    @property
    def room(self) -> int:
        """Tokens that fit."""
        return int(self.stored[0].shape[4])

    def grow(self, room: int) -> None:
        """Make room for so many tokens."""
        if self.start + room <= self.room:
            return
        self._cut = {}
        if room > self.room:
            self.stored = [torch.nn.functional.pad(x, (0, 0, 0, room + ROOM - self.room)) for x in self.stored]
        if self.start:
            for x in self.stored:
                x[..., : self.room - self.start, :] = x[..., self.start :, :].clone()
            self.start = 0

    def of_rows(self, rows: list[int]) -> Views:
        """Those of some of the rows, in rising order; where they lie if they are neighbours and no eviction copies them.

        A spare is nobody else's, or one team would copy into what another reads.
        """
        if self.spare is None and rows[-1] - rows[0] == len(rows) - 1:
            return Views(self.layers, [x[:, :, rows[0] : rows[-1] + 1] for x in self.stored], None, self.start)
        chosen = numbers(tuple(rows), self.stored[0].device)
        return Views(self.layers, [x.index_select(2, chosen) for x in self.stored], None, self.start)

    def keep(self, index_YRHN: Tensor, room: int) -> None:
        """Copy the tokens index_YRHN of every layer, row and head to the front, with `room` free places behind them."""
        self._cut = {}
        index = torch.nn.functional.pad(index_YRHN, (0, room))
        for i, x in enumerate(self.stored):
            starts = torch.arange(0, math.prod(x.shape[:5]), x.shape[4], device=index.device)
            flat = (index + starts.view(*x.shape[:4], 1)).flatten()
            out, size = self.spare, flat.numel() * x.shape[-1]
            if out is None or out.numel() < size:
                out = x.new_empty(size)
            kept = torch.index_select(x.flatten(0, 4), 0, flat, out=out[:size].view(-1, x.shape[-1]))
            self.stored[i], self.spare = kept.view(*x.shape[:4], -1, x.shape[-1]), x.flatten()


def _tokens(stored: Sequence[Tensor], start: int, n: int) -> list[Tensor]:
    """N tokens of views, from their place `start` on."""
    return [x.narrow(4, start, n) for x in stored]


def _spans(stored: Sequence[Tensor], start: int, n: int, length: int) -> list[Span]:
    """Of every layer of views."""
    sides = (side.unbind(0) for x in _tokens(stored, start, n + length) for side in x.unbind(0))
    free = zip(*(x.unbind(1) for x in _tokens(stored, start + n, length)), strict=True)
    return [Span(k, v, places) for k, v, places in zip(*sides, free, strict=True)]


@dataclass(eq=False)
class Team:
    """Sequences of one shape: the caller's numbers for them, their rows in this forward, their views if there are any."""

    members: list[int]
    rows: list[int] = field(default_factory=list)
    views: list[Views] | None = None  # one for each group of layers

    def of(self, members: list[int]) -> Team:
        """A team of some of the members."""
        if members == self.members:
            return self
        at = [self.members.index(i) for i in members]
        return Team(members, views=None if self.views is None else [one.of_rows(at) for one in self.views])


def in_order(teams: Sequence[Team], outs: Sequence[Tensor], length: int) -> Tensor:
    """Outputs [B, L, Q, D] of all rows, out of those of each team, which may have fewer tokens."""
    found: dict[int, Tensor] = {}  # by the first row they are for
    for team, out in zip(teams, outs, strict=True):
        rows = team.rows
        if out.shape[1] < length:
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, length - out.shape[1]))
        if rows[-1] - rows[0] == len(rows) - 1:
            found[rows[0]] = out
        else:
            found |= {row: out[i : i + 1] for i, row in enumerate(rows)}
    return found[0] if len(found) == 1 else torch.cat([found[row] for row in sorted(found)])
