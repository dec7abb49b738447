"""Attention over ragged stores, rows of one shape at a time, through transformers' own sdpa; it knows no policy and no task.

Registered once under our own name. Whatever the current `Forward` says is attended to and recorded; nothing is evicted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.kv import honoured
from harness.kv.attention_stats import column_sums, query_moments, step_sums
from harness.kv.batch_views import Team, Views
from harness.kv.head_group import Slot
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.kv.token_store import TokenStore, own
from harness.stages.protocols import Needs, Stats

NAME = "kv_harness"

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
    stats: dict[int, list[Stats]] = field(default_factory=dict)
    masks: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)
    picks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # of a layer: its group, and where it stands there
    dtype: torch.dtype = torch.float32  # what attention computes in, as it was met

    def __post_init__(self) -> None:
        self.places = {layer: (g, at) for g, group in enumerate(self.groups) for at, layer in enumerate(group)}

    def keep_new(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Copy a layer's new rows [B, H, L, D], rounded to the cache dtype, beside those of its group."""
        group, at = self.places[layer]
        if group not in self.new:
            b, *rest = key.shape
            size = (b, len(self.groups[group]), *rest[:-1])
            both = (torch.empty(*size, x.shape[-1], dtype=self.kv_dtype, device=x.device) for x in (key, value))
            self.new[group] = (next(both), next(both))
        for buffer, x in zip(self.new[group], (key, value), strict=True):
            buffer[:, at] = x
        self.dtype = key.dtype

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
            shape = tuple((part.heads.start, part.heads.stop, part.n) for part, _ in self.stores[row].get(layer, ()))
            groups.setdefault((n, *shape), []).append(row)
        return [Team([], rows) for rows in groups.values()]

    def pick(self, x: Tensor, rows: list[int]) -> Tensor:
        """The batch rows `rows` of x; a view where they follow one another."""
        if rows[-1] - rows[0] == len(rows) - 1:  # always in rising order
            return x[rows[0] : rows[0] + len(rows)]
        key = (*rows, x.device)
        if key not in self.picks:
            self.picks[key] = torch.tensor(rows, device=x.device)
        return x.index_select(0, self.picks[key])


CURRENT: ContextVar[Forward] = ContextVar("kv_harness_forward")


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention interface of transformers: query [B, Q, L, D], key and value [B, H, L, D] hold the new tokens only.

    Returns [B, L, Q, D]. Outputs of padding (tokens beyond a row's own length) are zero.
    """
    run, layer = CURRENT.get(), int(module.layer_idx)  # type: ignore[arg-type]
    honoured.refuse(layer in run.stats, f"its layer {layer} attends twice in one forward")
    honoured.check(module, run.shape.layers[layer], key, value, attention_mask, kwargs)
    call = _Call(module, run, layer, query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs)
    run.keep_new(layer, key, value)
    run.stats[layer] = [Stats()] * len(run.lengths)
    outputs: dict[int, Tensor] = {}  # by the first row they are for
    teams = run.alike(layer)
    for team in teams:
        rows, n = team.rows, run.lengths[team.rows[0]]
        out = _attend_rows(call, team, *(run.pick(x, rows)[:, :, :n] for x in (query, key, value)))
        if n < query.shape[2]:
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, query.shape[2] - n))
        if rows[-1] - rows[0] == len(rows) - 1:
            outputs[rows[0]] = out
        else:
            outputs |= {row: out[i : i + 1] for i, row in enumerate(rows)}
    joined = outputs[0] if len(outputs) == 1 else torch.cat([outputs[row] for row in sorted(outputs)])
    if run.reference is not None:
        run.errors[layer] = _distances(joined, run.reference)
    return joined, None


def _distances(out: Tensor, reference: Sequence[int]) -> Tensor:
    """[B, 2]: squared distance of each row's output to that of its reference row, and the squared size of the latter."""
    flat = out.float().flatten(1)
    wanted = flat[torch.tensor(list(reference), device=out.device)]
    return torch.stack(((flat - wanted).square().sum(1), wanted.square().sum(1)), 1)


@dataclass(frozen=True)
class _Call:
    """What all rows of one layer's attention share."""

    module: torch.nn.Module
    run: Forward
    layer: int
    scaling: float
    kwargs: dict[str, Any]

    @property
    def window(self) -> int | None:
        return self.run.shape.layers[self.layer].window


def _attend_rows(call: _Call, team: Team, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q, D] of rows whose stores have the same shape, part by part; their statistics go to the forward."""
    run, rows, outputs = call.run, team.rows, []
    group, length = q.shape[1] // k.shape[1], k.shape[2]
    stores = [run.stores[row].get(call.layer, ()) for row in rows]
    for slots in zip(*stores, strict=True) if stores[0] else [()]:
        heads = slice(slots[0].head_group.heads.start, slots[0].head_group.heads.stop) if slots else slice(0, k.shape[1])
        part_q = q[:, heads.start * group : heads.stop * group]
        if team.views is not None:
            all_k, all_v = _shown(call, team.views, slots[0].head_group.n, heads, (k, v))
        else:
            all_k = _joined([(slot.head_group.keys, slot.at) for slot in slots], k[:, heads])
            all_v = _joined([(slot.head_group.values, slot.at) for slot in slots], v[:, heads])
            _turn_stored(call, rows, all_k, length)
        mask = run.mask(all_k.shape[2] - length, length, call.window)
        mask = mask if mask is None else mask.to(q.device)
        out, _ = sdpa_attention_forward(call.module, part_q, all_k, all_v, mask, scaling=call.scaling, **call.kwargs)
        outputs.append(out)
        _record(call, rows, part_q, all_k)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _shown(call: _Call, views: Sequence[Views], n: int, heads: slice, new: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The same from views: K and V [R, H, N + L, D] of some heads, the new tokens written behind the N stored ones."""
    group, at = call.run.places[call.layer]
    shown, stop = [], n + new[0].shape[2]
    for x, new_RHLD in zip(views[group].both, new, strict=True):
        view = x[at, :, heads, :stop]
        view[:, :, n:] = new_RHLD[:, heads]
        shown.append(view)
    return shown


def _joined(stored: list[tuple[TokenStore, slice]], new_RHLD: Tensor) -> Tensor:
    """Stored rows followed by the new ones, [R, H, N + L, D], decoded to the compute dtype; written once."""
    if not stored or not stored[0][0].n:
        return new_RHLD
    (r, h, length, d), n = new_RHLD.shape, stored[0][0].n
    out = new_RHLD.new_empty(r, h, n + length, d)
    for (side, at), one in zip(stored, out, strict=True):
        side.write_to(one[:, :n], at)
    out[:, :, n:] = new_RHLD
    return out


def _turn_stored(call: _Call, rows: list[int], k_RHND: Tensor, length: int) -> None:
    """Rotate, in place, stored keys that have no rotation yet to the places just before the new tokens."""
    n = k_RHND.shape[2] - length
    for row, k_HND in zip(rows, k_RHND, strict=True):
        if n and call.run.is_unrotated(row):
            rope = call.run.ropes[call.layer]
            assert rope is not None
            k_HND[:, :n] = rope.range(k_HND[:, :n], call.run.start(row) - n)


def _record(call: _Call, rows: list[int], q: Tensor, k: Tensor) -> None:
    """Statistics that each row asked for; rows that want column sums are summed in one go."""
    needs = [call.run.needs[row] if call.window is None else Needs() for row in rows]
    if not any(needs):
        return
    sums: dict[int, Tensor] = {}
    if wanted := [i for i, need in enumerate(needs) if need.column_sums]:
        some_q, some_k = call.run.pick(q, wanted), call.run.pick(k, wanted)
        if q.shape[2] == 1:
            found = step_sums(some_q[:, :, 0], some_k, call.scaling)
        else:
            flat = column_sums(some_q.flatten(0, 1), some_k.flatten(0, 1), call.scaling)
            found = flat.unflatten(0, (len(wanted), -1))  # type: ignore[no-untyped-call]
        sums = dict(zip(wanted, found, strict=True))
    for i, (row, need) in enumerate(zip(rows, needs, strict=True)):
        if not need:
            continue
        queries = own(q[i, :, -need.queries :]) if need.queries else None
        mean, cov = _moments(call, row, q[i]) if need.query_moments else (None, None)
        call.run.stats[call.layer][row] = Stats(sums.get(i), queries, call.scaling, mean, cov)


def _moments(call: _Call, row: int, q_QLD: Tensor) -> tuple[Tensor, Tensor]:
    rope, start = call.run.ropes[call.layer] if call.run.ropes else None, call.run.start(row)
    if rope is None:
        return query_moments(q_QLD)
    positions = torch.arange(start, start + q_QLD.shape[1], device=q_QLD.device)
    return query_moments(rope.unrotate(q_QLD.float(), positions))


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks are built per row from what it stores."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
