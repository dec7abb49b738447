"""Decoded copies of the stores of a batch, kept between forwards: the evaluator's scratch, never a stack's bytes.

Sequences that hold as many tokens in every layer and head are a team: they attend in one call, and their decoded keys and
values lie in one tensor for each group of layers, [layers, R, H, room, D]. New tokens are written in place;
what a codec then encodes is decoded again, and nothing else; evictions copy what stays, and what leaves a sliding window is
passed over until its places are needed. The stores themselves are not touched,
and a view holds, bit for bit, what the store would decode to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from harness.kv.memory import measure
from harness.kv.teams import ROOM, Team, Views
from harness.kv.token_store import TokenStore
from harness.stages.keep import check_finite

if TYPE_CHECKING:
    from harness.kv.forward import Forward
    from harness.kv.head_group import HeadGroup
    from harness.kv.sequence_cache import SequenceCache
    from harness.kv.shape import ModelShape
    from harness.stages.keep import Choice


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
            if len(team.members) == 1:  # nothing to be alike to
                teams += [team] if team.members[0] in going else []
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
            if self.room and (lockstep or team.views is not None):  # views that are there must have room, whoever is fed
                self._show(team, [rows[i] for i in team.members], lengths[team.members[0]])
        return order

    def _show(self, team: Team, rows: list[SequenceCache], length: int) -> None:
        """Give a team its views, or those it has room for the new tokens."""
        if team.views is not None:
            for one in team.views:
                one.grow(_longest(rows[0], one.layers) + length)
            return
        # What is turned, or spread over heads and layers, whenever it is read, or changed by evictions, is not kept.
        if any(row.unrotated or row.stack.share or row.stack.merges or not row.head_groups for row in rows):
            return
        views = [self._empty(group, rows, length) for group in self.groups] if self._fits(rows, length) else []
        for one in views:
            for i, row in enumerate(rows):
                _decode(one, i, row)
        team.views = views or None

    def _size(self, group: tuple[int, ...], rows: list[SequenceCache], length: int) -> tuple[int, int, int]:
        """R, H, and tokens that views get room for: where every step evicts, no more than the next ones."""
        room = length + (0 if self._evicts(group, rows) else ROOM)
        return len(rows), self.shape.layers[group[0]].heads, _longest(rows[0], group) + room

    def _fits(self, rows: list[SequenceCache], length: int) -> bool:
        need = 0
        for group in self.groups:
            dims = self._dims(group)
            each = sum(dims) + (max(dims) * (2 if dims[0] == dims[1] else 1) if self._copies(group, rows) else 0)
            need += math.prod(self._size(group, rows, length)) * len(group) * each
        return need * self.dtype.itemsize + self.nbytes <= self.room

    def _empty(self, group: tuple[int, ...], rows: list[SequenceCache], length: int) -> Views:
        device = rows[0].slots[group[0]][0].head_group.keys.tail_HND.device
        size, dims = (len(group), *self._size(group, rows, length)), self._dims(group)
        shapes = [(2, *size, dims[0])] if dims[0] == dims[1] else [(1, *size, d) for d in dims]
        stored = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]
        most = max(x.numel() for x in stored)
        return Views(group, stored, stored[0].new_empty(most) if self._evicts(group, rows) else None)

    def _dims(self, group: tuple[int, ...]) -> tuple[int, int]:
        layer = self.shape.layers[group[0]]
        return layer.d_key, layer.d_value

    def _evicts(self, group: tuple[int, ...], rows: list[SequenceCache]) -> bool:
        """Whether steps evict tokens of a group, so that what stays is copied again and again."""
        return rows[0].stack.evicts_steps and self._window(group) is None

    def _copies(self, group: tuple[int, ...], rows: list[SequenceCache]) -> bool:
        """Whether tokens that are shown are copied at times: after evictions, and to the front of a window's room."""
        return rows[0].stack.evicts_steps or self._window(group) is not None

    def _window(self, group: tuple[int, ...]) -> int | None:
        return self.shape.layers[group[0]].window

    @property
    def nbytes(self) -> int:
        """Bytes of all views; those of teams that were one before may lie in one storage."""
        views = [one for team in self.teams for one in team.views or ()]
        return measure(("views", x) for one in views for x in (*one.stored, one.spare) if x is not None).total

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
                window, first = self._window(one.layers), team.rows[0]
                if window is not None:  # stored as they are, by every stack
                    one.start += max(0, _longest(before[first], one.layers) + run.lengths[first] - (window - 1))
                    continue
                for i, b in enumerate(team.rows):
                    _encoded(one, i, run, g, before[b], grown[b])
                stay = [_stay(one, before[b], run.lengths[b], choices[b]) for b in team.rows]
                if any(x is not None for x in stay):
                    room = max(run.lengths[team.rows[0]], *(grown[b].stack.every for b in team.rows))
                    one.keep(_together(one, stay, max(_longest(grown[b], one.layers) for b in team.rows)), room)


def settled(
    grown: Sequence[SequenceCache],
    run: Forward,
    before: Sequence[SequenceCache] = (),
    batch: Batch | None = None,
    members: Sequence[int] | None = None,
) -> list[SequenceCache]:
    """Caches back at their budgets after a forward, the views of their batch, if there is one, brought up to date.

    members: for each cache its row of the forward, where several share one.
    """
    rows = range(len(grown)) if members is None else members
    choices = [cache.choices(run, b) for cache, b in zip(grown, rows, strict=True)]
    check_finite(choice for one in choices for choice in one or ())
    if batch is not None:
        batch.follow(run, before, grown, choices)
    return [cache.evicted(choice) for cache, choice in zip(grown, choices, strict=True)]


def _together(one: Views, stay: Sequence[Tensor | None], most: int) -> Tensor:
    """The indices of all rows, [layers, R, H, M]; None: all tokens, at most `most`. What fills up is never read."""
    longest = max(most if x is None else x.shape[-1] for x in stay)
    heads, device = one.stored[0].shape[3], one.stored[0].device
    filled = []
    for x in stay:
        if x is None:
            x = torch.arange(longest, device=device).expand(len(one.layers), heads, -1)
        filled.append(x if x.shape[-1] == longest else torch.nn.functional.pad(x, (0, longest - x.shape[-1])))
    return torch.stack(filled, 1)


def _shape(row: SequenceCache, length: int) -> object:
    own = row.stack.evicts_steps, row.stack.merges, row.unrotated, id(row.stack.share)
    return length, *own, tuple((part.heads, part.n) for part in row.head_groups)


def _longest(row: SequenceCache, layers: tuple[int, ...]) -> int:
    return max(part.n for part in row.head_groups if part.heads.layers[0] in layers)  # a head group's layers are of one group


def _decode(one: Views, i: int, row: SequenceCache) -> None:
    """Write all that a row stores into its place in the views."""
    for at, layer in enumerate(one.layers):
        for part, where in row.slots[layer]:
            heads = slice(part.heads.start, part.heads.stop)
            for x, side in zip(one.both, (part.keys, part.values), strict=True):
                side.write_to(x[at, i, heads, : part.n], where)


def _encoded(one: Views, i: int, run: Forward, group: int, before: SequenceCache, grown: SequenceCache) -> None:
    """Decode what a codec took over in this forward into a row's views."""
    for old, part in zip(before.head_groups, grown.head_groups, strict=True):
        if run.places[part.heads.layers[0]][0] != group:
            continue
        for at, (side, was) in enumerate(((part.keys, old.keys), (part.values, old.values))):
            if side.codec.lossy and side.n_encoded > was.n_encoded:
                _decode_newer(one.both[at][:, i], run, part, side, was.n_encoded)


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


def _stay(one: Views, before: SequenceCache, length: int, choices: list[Choice] | None) -> Tensor | None:
    """Which tokens of a row's views stay, [layers, H, M]; None when all do."""
    mine = [c for c in choices or () if c.layers[0] in one.layers]
    if not mine:
        return None
    heads, device = int(one.stored[0].shape[3]), one.stored[0].device
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
