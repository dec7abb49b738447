"""Decoded copies of the stores of a batch, kept between forwards: the evaluator's scratch, never a stack's bytes.

Sequences that hold as many tokens in every layer and head are a team: they attend in one call, and their decoded keys and values
lie in one tensor for each group of layers, [layers, R, H, room, D]. New tokens are written behind the stored ones, in place;
what a codec then encodes is decoded again, and nothing else; evictions copy what stays. The stores themselves are not touched,
and a view holds, bit for bit, what the store would decode to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.kv.token_store import TokenStore

if TYPE_CHECKING:
    from harness.kv.attention import Forward
    from harness.kv.head_group import HeadGroup
    from harness.kv.sequence_cache import SequenceCache
    from harness.kv.shape import ModelShape
    from harness.stages.keep import Choice

ROOM = 64  # tokens that a view can grow by before it is copied into a larger one


@dataclass(eq=False)
class Views:
    """Decoded K and V of a team in one group of layers, [layers, R, H, room, D] each; a third buffer takes what stays."""

    layers: tuple[int, ...]
    both: list[Tensor]
    spare: Tensor | None

    @classmethod
    def empty(
        cls,
        layers: tuple[int, ...],
        size: tuple[int, int, int],
        dims: tuple[int, int],
        dtype: torch.dtype,
        evicts: bool,
        device: torch.device,
    ) -> Views:
        """size: R, H, room; dims: of keys and values."""
        r, h, room = size
        both = [torch.zeros(len(layers), r, h, room, d, dtype=dtype, device=device) for d in dims]
        spare = torch.empty(max(x.numel() for x in both), dtype=dtype, device=device) if evicts else None
        return cls(layers, both, spare)

    @property
    def room(self) -> int:
        """Tokens that fit."""
        return int(self.both[0].shape[3])

    def grow(self, room: int) -> None:
        """Make room for so many tokens."""
        if room > self.room:
            self.both = [torch.nn.functional.pad(x, (0, 0, 0, room + ROOM - self.room)) for x in self.both]

    def of_rows(self, rows: list[int]) -> Views:
        """Those of some of the rows."""
        chosen = torch.tensor(rows, device=self.both[0].device)
        return Views(self.layers, [x.index_select(1, chosen) for x in self.both], self.spare)

    def keep(self, index_LRHM: Tensor, room: int) -> None:
        """Copy the tokens index_LRHM of every layer, row and head to the front, with `room` free places behind them."""
        index = torch.nn.functional.pad(index_LRHM, (0, room))
        layers, r, h, n = index.shape
        starts = torch.arange(0, layers * r * h * self.room, self.room, device=index.device)
        flat = (index + starts.view(layers, r, h, 1)).flatten()
        for i, x in enumerate(self.both):
            out, size = self.spare, flat.numel() * x.shape[-1]
            if out is None or out.numel() < size:
                out = x.new_empty(size)
            self.both[i] = torch.index_select(x.flatten(0, 3), 0, flat, out=out[:size].view(-1, x.shape[-1])).view(
                layers, r, h, n, x.shape[-1]
            )
            self.spare = x.flatten()


@dataclass(eq=False)
class Team:
    """Sequences of one shape: the numbers the caller gave them, their rows in this forward, and their views if there are any."""

    members: list[int]
    rows: list[int] = field(default_factory=list)
    views: list[Views] | None = None  # one for each group of layers

    def of(self, members: list[int]) -> Team:
        """A team of some of the members."""
        if members == self.members:
            return self
        at = [self.members.index(i) for i in members]
        return Team(members, views=None if self.views is None else [one.of_rows(at) for one in self.views])


class Batch:
    """The teams of sequences that are fed in lockstep. room: most bytes of all views together; 0 keeps none."""

    def __init__(self, shape: ModelShape, groups: Sequence[tuple[int, ...]], dtype: torch.dtype, room: int) -> None:
        self.shape, self.groups, self.dtype, self.room = shape, groups, dtype, room
        self.teams: list[Team] = []

    def form(self, live: Sequence[int], rows: Sequence[SequenceCache], lengths: Sequence[int]) -> list[int]:
        """Put the sequences that go on into teams, for a forward of so many new tokens each; returns them team by team.

        rows and lengths are those of all sequences, by their numbers.
        """
        going, teams = set(live), []
        for team in self.teams:
            if team.views is None:
                continue
            alike: dict[object, list[int]] = {}
            for i in team.members:
                if i in going:
                    alike.setdefault(_shape(rows[i], lengths[i]), []).append(i)
            teams += [team.of(members) for members in alike.values()]
        placed = {i for team in teams for i in team.members}
        new: dict[object, list[int]] = {}
        for i in live:
            if i not in placed:
                new.setdefault(_shape(rows[i], lengths[i]), []).append(i)
        teams += [Team(members) for members in new.values()]
        self.teams = teams
        lockstep = len({lengths[i] for i in live}) == 1
        order: list[int] = []
        for team in teams:
            team.rows = list(range(len(order), len(order) + len(team.members)))
            order += team.members
            if lockstep and self.room:
                self._show(team, [rows[i] for i in team.members], lengths[team.members[0]])
        return order

    def _show(self, team: Team, rows: list[SequenceCache], length: int) -> None:
        """Give a team its views, or those it has room for the new tokens."""
        if team.views is not None:
            for one in team.views:
                one.grow(_longest(rows[0], one.layers) + length)
            return
        if any(row.unrotated or not row.head_groups for row in rows):  # what is turned whenever it is read is not kept
            return
        views, evicts = [], rows[0].stack.evicts_steps
        sizes = [
            (len(rows), self.shape.layers[g[0]].heads, _longest(rows[0], g) + length + (0 if evicts else ROOM))
            for g in self.groups
        ]
        dims = [(self.shape.layers[g[0]].d_key, self.shape.layers[g[0]].d_value) for g in self.groups]
        parts = [(math.prod(s) * len(g), d) for g, s, d in zip(self.groups, sizes, dims, strict=True)]
        need = sum(n * (sum(d) + max(d) * evicts) for n, d in parts) * self.dtype.itemsize
        if need + self.nbytes > self.room:
            return
        for g, size, dim in zip(self.groups, sizes, dims, strict=True):
            device = rows[0].slots[g[0]][0].head_group.keys.tail_HND.device
            views.append(Views.empty(g, size, dim, self.dtype, evicts, device))
        for i, row in enumerate(rows):
            for one in views:
                for at, layer in enumerate(one.layers):
                    for slot in row.slots[layer]:
                        heads = slice(slot.head_group.heads.start, slot.head_group.heads.stop)
                        for x, side in zip(one.both, (slot.head_group.keys, slot.head_group.values), strict=True):
                            side.write_to(x[at, i, heads, : slot.head_group.n], slot.at)
        team.views = views

    @property
    def nbytes(self) -> int:
        """Bytes of all views."""
        held = [x for team in self.teams for one in team.views or () for x in (*one.both, one.spare) if x is not None]
        return sum(x.numel() for x in held) * self.dtype.itemsize

    def follow(
        self,
        run: Forward,
        before: Sequence[SequenceCache],
        grown: Sequence[SequenceCache],
        choices: Sequence[list[Choice] | None],
    ) -> None:
        """Bring the views up to date after a forward: for its rows, the stores before it, with its tokens, and what stays."""
        for team in self.teams:
            for g, one in enumerate(team.views or ()):
                for i, b in enumerate(team.rows):
                    _encoded(one, i, run, g, before[b], grown[b])
                stay = [_stay(one, before[b], run.lengths[b], self._window(g), choices[b]) for b in team.rows]
                if any(x is not None for x in stay):
                    heads, longest = one.both[0].shape[2], max(x.shape[-1] for x in stay if x is not None)
                    longest = max(
                        [longest, *(_longest(grown[b], one.layers) for b, x in zip(team.rows, stay, strict=True) if x is None)]
                    )
                    every = torch.arange(longest, device=one.both[0].device).expand(len(one.layers), heads, -1)
                    index = torch.stack(
                        [every if x is None else torch.nn.functional.pad(x, (0, longest - x.shape[-1])) for x in stay], 1
                    )
                    one.keep(index, max(run.lengths[team.rows[0]], *(grown[b].stack.every for b in team.rows)))

    def _window(self, group: int) -> int | None:
        return self.shape.layers[self.groups[group][0]].window


def _shape(row: SequenceCache, length: int) -> object:
    return length, row.stack.evicts_steps, tuple((part.heads, part.n) for part in row.head_groups)


def _longest(row: SequenceCache, layers: tuple[int, ...]) -> int:
    return max(slot.head_group.n for layer in layers for slot in row.slots[layer])


def _encoded(one: Views, i: int, run: Forward, group: int, before: SequenceCache, grown: SequenceCache) -> None:
    """Decode what a codec took over in this forward into a row's views."""
    for old, part in zip(before.head_groups, grown.head_groups, strict=True):
        if run.places[part.heads.layers[0]][0] != group:
            continue
        for x, side, was in zip(one.both, (part.keys, part.values), (old.keys, old.values), strict=True):
            if side.codec.lossy and side.n_encoded > was.n_encoded:
                _decode_newer(x[:, i], run, part, side, was.n_encoded)


def _decode_newer(view_LHND: Tensor, run: Forward, part: HeadGroup, side: TokenStore, old: int) -> None:
    heads = slice(part.heads.start, part.heads.stop)
    at = [run.places[layer][1] for layer in part.heads.layers]
    where = slice(side.n_first + old, side.n_first + side.n_encoded)
    if not getattr(side.codec, "by_tokens", False):
        for layer, place in zip(part.heads.layers, at, strict=True):
            side.write_to(view_LHND[place, heads, : side.n], part.slot(layer))
        return
    fresh = side.newest_encoded(side.n_encoded - old, view_LHND.dtype).unflatten(0, (len(at), -1))  # type: ignore[no-untyped-call]
    if len(at) == len(view_LHND):
        view_LHND[:, heads, where] = fresh
    else:
        for k, place in enumerate(at):
            view_LHND[place, heads, where] = fresh[k]


def _stay(one: Views, before: SequenceCache, length: int, window: int | None, choices: list[Choice] | None) -> Tensor | None:
    """Which tokens of a row's views stay, [layers, H, M]; None when all do."""
    heads, device = int(one.both[0].shape[2]), one.both[0].device
    if window is not None:
        n = _longest(before, one.layers) + length
        return None if n < window else torch.arange(n - window + 1, n, device=device).expand(len(one.layers), heads, -1)
    mine = [c for c in choices or () if c.layers[0] in one.layers]
    if not mine:
        return None
    if len(mine) == 1 and mine[0].layers == one.layers and mine[0].head is None:
        return mine[0].index_HM.view(len(one.layers), heads, -1)
    longest = _longest(before, one.layers) + length
    index = torch.arange(longest, device=device).repeat(len(one.layers), heads, 1)
    for choice in mine:
        for k, layer in enumerate(choice.layers):
            at, m = one.layers.index(layer), choice.index_HM.shape[1]
            some = slice(None) if choice.head is None else slice(choice.head, choice.head + 1)
            each = heads if choice.head is None else 1
            index[at, some, :m] = choice.index_HM[k * each : (k + 1) * each]
    return index
