"""What one forward of a batch is: the sequences' stores, what attention shares between layers, what it records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.kv.attending.new_tokens import NewTokens
from harness.kv.attending.seat import Seat, seat_of
from harness.kv.families.latent import Latent
from harness.kv.families.states import States
from harness.kv.head_group import Slot
from harness.kv.honoured import unsupported
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape, places_of
from harness.kv.teams import Team
from harness.stages.protocols import Needs, Rope, Stats
from harness.stages.transfers import numbers

NOTHING = Stats()
Store = Mapping[int, Sequence[Slot]]
"""What one row stores: for each layer, its parts in the order of their heads (none before the first token)."""


@dataclass
class Forward:
    """One forward of B rows: what each row has stored, how many of its L query tokens are real, what to record.

    After the forward, `new` holds the new K and V of all rows for each group of layers, until views change, `stats` what was
    recorded, as [layer][row], and `states` the rows' recurrent states.
    """

    shape: ModelShape
    groups: tuple[tuple[int, ...], ...]  # layers whose new rows lie in one tensor
    stores: Sequence[Store]
    seen: Sequence[int]
    lengths: Sequence[int]
    needs: Sequence[Needs]
    kv_dtype: torch.dtype
    ropes: Sequence[LayerRope | None] = ()
    starts: Sequence[int] | None = None  # position of each row's first new token; None: as many as it has seen
    unrotated: Sequence[bool] | None = None  # rows whose stored keys wait to be rotated when they are read
    by_index: Sequence[bool] | None = None  # those of them that are rotated to their place in the cache, not their own position
    by_row: bool = False  # every row attends in a call of its own, so that its bits depend on nothing beside it
    teams: Sequence[Team] | None = None  # rows that attend in one call, in order; None: those that are alike in a layer
    reference: Sequence[int] | None = None  # for every row, the row whose attention output it is compared with
    # By the layer's number in the model:
    against: Mapping[int, Tensor] | None = None  # the output that a single row is compared with, of another forward
    outputs: dict[int, Tensor] | None = None  # its output, where rows of other forwards are compared with it
    errors: dict[int, Tensor] = field(default_factory=dict)  # [B, 2]: |out - ref|^2, |ref|^2
    new: dict[int, NewTokens] = field(default_factory=dict)
    stats: dict[int, list[Stats]] = field(default_factory=dict)
    states: Sequence[States] = ()
    latents: Sequence[Latent | None] = ()  # of each layer, how what it stores becomes keys and values; None: it is them
    seats: dict[torch.nn.Module, Seat] = field(default_factory=dict)  # of the model's attention modules, as they are met
    entering: dict[int, Tensor] = field(default_factory=dict)  # of a layer, the new tokens' latents [B, ..., L, C], as met
    handed: set[int] = field(default_factory=set)  # layers that were given what is stored too, and have not attended yet
    leaves: dict[int, tuple[Tensor, Tensor]] | None = None  # where gradients are asked for: keys and values as attended to
    masks: dict[tuple[int, int, int | None, torch.device], Tensor] = field(default_factory=dict)
    picks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)  # the numbers in the model of the layers that have attended
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # of a layer: its group, and where it stands there
    dtype: torch.dtype = torch.float32  # what attention computes in, as it was met
    asking: frozenset[int] = frozenset()  # rows that ask for statistics
    turns: bool = False  # whether any row's stored keys wait to be rotated

    def __post_init__(self) -> None:
        self.asking = frozenset(row for row, need in enumerate(self.needs) if need)
        self.turns = any(self.unrotated or ())
        self.places = places_of(self.groups)

    def enter(self, module: torch.nn.Module) -> Seat:
        """The seat of a module that attends now.

        UserError if it has none, if no layer has filled the store that it reads, or if it attends a second time.
        """
        seat = self.seats.get(module)
        if seat is None:
            seat = self.seats[module] = seat_of(module, self.shape, self.latents)
        if seat.number in self.attended:
            raise unsupported(f"its layer {seat.number} attends twice in one forward")
        if seat.reads and seat.layer not in self.stats:
            raise unsupported(f"its layer {seat.number} reads a store that no layer has filled yet")
        self.attended.add(seat.number)
        return seat

    def part(self, rows: Sequence[int], outputs: Mapping[int, Mapping[int, Tensor]]) -> Forward:
        """The same for some rows only, in rising order; nothing is recorded yet.

        outputs: of single rows that were fed, by row and layer, to compare others with. Views are used where their teams are
        whole.
        """
        teams = [team for team in self.teams or () if not set(rows).isdisjoint(team.rows)]
        whole = self.teams is not None and all(set(rows).issuperset(team.rows) for team in teams)
        references = None if self.reference is None else [self.reference[row] for row in rows]
        apart = references is not None and not set(rows).issuperset(references)
        return Forward(
            shape=self.shape,
            groups=self.groups,
            stores=[self.stores[row] for row in rows],
            seen=[self.seen[row] for row in rows],
            lengths=[self.lengths[row] for row in rows],
            needs=[self.needs[row] for row in rows],
            kv_dtype=self.kv_dtype,
            ropes=self.ropes,
            starts=None if self.starts is None else [self.starts[row] for row in rows],
            unrotated=None if self.unrotated is None else [self.unrotated[row] for row in rows],
            by_index=None if self.by_index is None else [self.by_index[row] for row in rows],
            by_row=self.by_row,
            teams=[replace(team, rows=[rows.index(row) for row in team.rows]) for team in teams] if whole else None,
            reference=None if references is None or apart else [rows.index(row) for row in references],
            against=outputs[references[0]] if references is not None and apart else None,
            outputs={} if references == list(rows) and len(rows) == 1 else None,
            latents=self.latents,
            seats=self.seats,
        )

    def join(self, rows: Sequence[int], part: Forward) -> None:
        """Take over what a part recorded."""
        for layer, found in part.stats.items():
            mine = self.stats.setdefault(layer, [Stats()] * len(self.lengths))
            for row, one in zip(rows, found, strict=True):
                mine[row] = one
        for layer, errors in part.errors.items():
            self.errors.setdefault(layer, errors.new_zeros(len(self.lengths), 2))[list(rows)] = errors

    def keep_new(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a layer's new rows [B, H, L, D], rounded to the cache dtype, beside those of its group; returns what is kept.

        What is recorded of the layer starts with nothing.
        """
        self.stats[layer] = [NOTHING] * len(self.lengths)
        if self.leaves is not None:  # nothing is kept: gradients are asked for, and buffers would be written to beneath them
            self.leaves[layer] = key, value = _differentiable(key, self.kv_dtype), _differentiable(value, self.kv_dtype)
            return key, value
        group, at = self.places[layer]
        if group not in self.new:
            self.new[group] = self._room(group, layer, key, value)
        k, v = self.new[group].by_layer[at]
        k.copy_(key)
        v.copy_(value)
        self.dtype = key.dtype
        return (key, value) if key.dtype == self.kv_dtype else (k, v)

    def _room(self, group: int, layer: int, key: Tensor, value: Tensor) -> NewTokens:
        """Room for a group's new tokens: in the views, if these show all rows and hold numbers of the cache dtype."""
        views = self.teams[0].views if self.teams is not None and len(self.teams) == 1 else None
        if views is not None and views[group].stored[0].dtype == self.kv_dtype:
            store = self.stores[0][layer]
            if len(store) == 1 and store[0].head_group.heads.layers == views[group].layers:
                return NewTokens.inside(views[group].free(store[0].head_group.n, key.shape[2]))
        return NewTokens.apart(key, value, len(self.groups[group]), self.kv_dtype, views=self.teams is not None)

    def kept_new(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's new rows [B, H, L, D] as they are kept, for a layer that reads its store."""
        group, at = self.places[layer]
        return self.new[group].by_layer[at]

    def query_rope(self, layer: int) -> Rope | None:
        """The rotation of a layer's queries; None if there is none, or none that can be undone."""
        rope, latent = self.ropes[layer] if self.ropes else None, self.latents[layer] if self.latents else None
        return rope if rope is None or latent is None else latent.rope(rope)

    def rows(self, group: int, row: int) -> tuple[Tensor, Tensor]:
        """A row's new K and V of a group's layers, [layers * H, L, D] with its own L; a view where it can be one."""
        n, whole = self.lengths[row], max(self.lengths)
        both = self.new[group].keys, self.new[group].values
        k, v = (x[row].flatten(0, 1) if n == whole else x[row, :, :, :n].flatten(0, 1) for x in both)
        return k, v

    def start(self, row: int) -> int:
        """Position of a row's first new token."""
        return self.seen[row] if self.starts is None else self.starts[row]

    def is_unrotated(self, row: int) -> bool:
        """Whether the row's keys are stored without rotation."""
        return self.unrotated is not None and self.unrotated[row]

    def own_positions(self, row: int, slot: Slot) -> Tensor | None:
        """Positions [H, N] that a row's stored keys are rotated to; None: the places just before its new tokens."""
        pos = slot.head_group.pos_HN
        if pos is None or (self.by_index is not None and self.by_index[row]):
            return None
        return pos[slot.at].repeat_interleave(slot.head_group.times, 0)

    def mask(self, past: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
        """Bool mask [1, 1, L, past + L] of the causal and sliding-window rule, made once; None where sdpa needs none.

        Stored rows of a full layer are all older than the queries, so only a window looks at positions; sliding layers
        keep their newest rows, which are contiguous.
        """
        slides = window is not None and past + length >= window  # stock hands sdpa a mask from here on
        if not slides and (length == 1 or past == 0):
            return None
        key = (past, length, window, device)
        if key not in self.masks:
            query = torch.arange(past, past + length, device=device)[:, None]
            row = torch.arange(past + length, device=device)[None]
            allowed = row <= query
            if slides:
                allowed &= row > query - int(window or 0)
            self.masks[key] = allowed[None, None]
        return self.masks[key]

    def alike(self, layer: int) -> list[Team]:
        """Batch rows whose stores have the same shape in a layer, and as many new tokens: they attend in one call."""
        if self.teams is not None:
            return list(self.teams)
        if len(self.lengths) == 1:
            return [Team([], [0])]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row, n in enumerate(self.lengths):
            shape = tuple(
                (s.heads.start, s.heads.stop, s.head_group.n, s.head_group.folded) for s in self.stores[row].get(layer, ())
            )
            groups.setdefault((n, *shape), []).append(row)
        return [Team([], rows) for rows in groups.values()]

    def calls(self, rows: Sequence[int]) -> list[slice]:
        """Which of some rows of one shape attend in one call: all at once, or each by itself.

        A library's attention adds in another order in another thread, or for another number of rows.
        """
        return [slice(i, i + 1) for i in range(len(rows))] if self.by_row else [slice(0, len(rows))]

    def pick(self, x: Tensor, rows: list[int], length: int | None = None) -> Tensor:
        """The batch rows `rows` of x, of x [B, H, L, D] their first tokens only; x itself or a view where it can be one."""
        if length is not None and length < x.shape[2]:
            x = x[:, :, :length]
        if len(rows) == x.shape[0]:  # always in rising order
            return x
        if rows[-1] - rows[0] == len(rows) - 1:
            return x[rows[0] : rows[0] + len(rows)]
        return x.index_select(0, numbers(tuple(rows), x.device))


def _differentiable(x: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """Numbers rounded to the cache dtype, as something to ask gradients for: they pass the rounding as if it were not there."""
    rounded = x.detach().to(kv_dtype).to(x.dtype)
    return x + (rounded - x.detach()) if x.requires_grad else rounded.requires_grad_()


CURRENT: ContextVar[Forward] = ContextVar("kv_harness_forward")
