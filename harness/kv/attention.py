"""Attention over ragged stores, rows of one shape at a time, through transformers' own sdpa or, with a softmax that sdpa lacks,
through ours; it knows no policy and no task.

Registered once under our own name. Whatever the current `Forward` says is attended to and recorded; nothing is evicted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.kv import honoured
from harness.kv.attention_stats import column_sums, distances, query_moments, step_sums
from harness.kv.families.softmax_attention import Seen, softmax_attention
from harness.kv.families.temperature import temperature_of
from harness.kv.forward import CURRENT, Forward
from harness.kv.head_group import Slot, with_new
from harness.kv.shared.flat_queries import beside_flat
from harness.kv.teams import Team
from harness.kv.token_store import own
from harness.stages.protocols import Needs, Stats
from harness.stages.softmax import Softmax
from harness.stages.transfers import numbers

NAME = "kv_harness"


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
    run, number = CURRENT.get(), honoured.layer_of(module)
    reads = number in run.shape.owners
    honoured.refuse(not reads and number not in run.shape.places, f"its layer {number} attends, and has no place in its cache")
    layer = run.shape.owners[number] if reads else run.shape.places[number]
    honoured.refuse(number in run.attended, f"its layer {number} attends twice in one forward")
    run.attended.add(number)
    honoured.check(module, run.shape.layers[layer], key, value, attention_mask, kwargs)
    softmax, kwargs = honoured.softmax_of(kwargs)
    if (temperature := temperature_of(module)) is not None:
        query = temperature.of(query, [run.start(row) for row in range(len(run.lengths))])
    latent = run.latent(layer)
    # Keys and values of new tokens, as the layer itself expanded them: right unless what is stored was rounded.
    given = (key, value) if latent is not None and key.dtype == run.kv_dtype else None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = _Call(module, run, layer, scaling, softmax, kwargs, query, reads, given)
    if latent is not None:
        key, value = latent.parts(key, run.entering.pop(layer))
    if reads:
        honoured.refuse(layer not in run.stats, f"its layer {number} reads a store that no layer has filled yet")
        key, value = run.kept_new(layer)
    else:
        key, value = run.keep_new(layer, key, value)
        run.stats[layer] = [Stats()] * len(run.lengths)
    outputs: dict[int, Tensor] = {}  # by the first row they are for
    teams = run.alike(layer)
    for team in teams:
        rows, n = team.rows, run.lengths[team.rows[0]]
        out = _attend_rows(call, team, *(run.pick(x, rows, n) for x in (query, key, value)))
        if n < query.shape[2]:
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, query.shape[2] - n))
        if rows[-1] - rows[0] == len(rows) - 1:
            outputs[rows[0]] = out
        else:
            outputs |= {row: out[i : i + 1] for i, row in enumerate(rows)}
    joined = outputs[0] if len(outputs) == 1 else torch.cat([outputs[row] for row in sorted(outputs)])
    if run.outputs is not None:
        run.outputs[number] = joined
    if run.against is not None:
        run.errors[number] = distances(joined, run.against[number])
    elif run.reference is not None:
        run.errors[number] = distances(joined, joined[numbers(tuple(run.reference), joined.device)])
    return joined, None


@dataclass(frozen=True)
class _Call:
    """What all rows of one layer's attention share."""

    module: torch.nn.Module
    run: Forward
    layer: int
    scaling: float
    softmax: Softmax
    kwargs: dict[str, Any]
    query: Tensor
    reads: bool = False  # the store of another layer, in whose statistics only its own queries count
    given: tuple[Tensor, Tensor] | None = None

    @cached_property
    def scaled_BQD(self) -> Tensor:
        """A single new query of every row times the scaling, fp32."""
        return self.query[:, :, 0].float() * self.scaling

    @property
    def window(self) -> int | None:
        return self.run.shape.layers[self.layer].window

    def expanded(self, rows: list[int], k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H, N + L, D] of what is stored and new, [R, H', N + L, D']: itself unless that is a latent."""
        latent = self.run.latent(self.layer)
        if latent is None:
            return k, v
        if self.given is not None and k.shape[2] == length:
            key, value = (self.run.pick(x, rows)[:, :, :length] for x in self.given)
            return key, value
        return latent.expand(k, v)


@dataclass(frozen=True)
class _Part:
    """Some KV heads of a layer, the softmax of their queries, and the positions of their keys if that looks at them."""

    heads: slice
    softmax: Softmax
    pos_RHN: Tensor | None

    def of(self, rows: slice) -> _Part:
        """The same for some of the rows."""
        return self if self.pos_RHN is None else replace(self, pos_RHN=self.pos_RHN[rows])


def _attend_rows(call: _Call, team: Team, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q, D] of rows whose stores have the same shape, part by part; their statistics go to the forward."""
    run, rows, outputs = call.run, team.rows, []
    group, length = q.shape[1] // k.shape[1], k.shape[2]
    stores = [run.stores[row].get(call.layer, ()) for row in rows]
    for slots in zip(*stores, strict=True) if stores[0] else [()]:
        heads = slots[0].heads if slots else slice(0, k.shape[1])
        mine = slice(heads.start * group, heads.stop * group)
        part_q, part_k = beside_flat(run, call.layer, rows, slots, q[:, mine], k[:, heads])
        if team.views is not None:
            all_k, all_v = _shown(call, team, slots[0].head_group.n, heads, length)
        else:
            all_k = with_new([(slot.keys, slot.at) for slot in slots], part_k.to(q.dtype))
            all_v = with_new([(slot.values, slot.at) for slot in slots], v[:, heads].to(q.dtype))
            _turn_stored(call, rows, slots, all_k, length)
        all_k, all_v = call.expanded(rows, all_k, all_v, length)
        softmax = call.softmax.of(mine)
        part = _Part(heads, softmax, _positions(call, rows, slots, all_k) if softmax.positional else None)
        each = [_output(call, rows[at], part.of(at), part_q[at], all_k[at], all_v[at]) for at in run.calls(rows)]
        outputs.append(each[0] if len(each) == 1 else torch.cat(each))
        _record(call, rows, part, part_q, all_k)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _output(call: _Call, rows: list[int], part: _Part, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q', D] of some heads of these rows, in one call."""
    if part.softmax.plain:
        return _sdpa(call, rows, q, k, v)
    seen = Seen(k.shape[2] - q.shape[2], call.window, part.pos_RHN)
    return softmax_attention(q, k, v, call.scaling, part.softmax, seen)


def _sdpa(call: _Call, rows: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Transformers' own attention, with the mask that it would be given."""
    past = k.shape[2] - q.shape[2]
    mask, shape = call.run.mask(past, q.shape[2], call.window, q.device), call.run.shape.layers[call.layer]
    if mask is not None and shape.chunked:
        mask = call.run.in_chunks(mask, rows, past, shape)
    out: Tensor = sdpa_attention_forward(call.module, q, k, v, mask, scaling=call.scaling, **call.kwargs)[0]
    return out


def _positions(call: _Call, rows: list[int], slots: Sequence[Slot], k_RHND: Tensor) -> Tensor:
    """Positions [R, H, N + L] of stored and new tokens, which a softmax with position biases looks at."""
    (_, h, n, _), run = k_RHND.shape, call.run
    found = []
    for row, slot in zip_longest(rows, slots):
        new = run.positions(run.start(row), n - (slot.head_group.n if slot else 0), k_RHND.device).expand(h, -1)
        found.append(torch.cat((slot.positions(run.seen[row]), new), 1) if slot else new)
    return torch.stack(found)


def _shown(call: _Call, team: Team, n: int, heads: slice, length: int) -> list[Tensor]:
    """The same from views: K and V [R, H, N + L, D] of some heads, the new tokens written behind the N stored ones."""
    group, at = call.run.places[call.layer]
    assert team.views is not None
    both = call.run.both.get(group)
    new = [x[None] for x in call.run.new[group]] if both is None else [both]
    rows, shown = slice(team.rows[0], team.rows[-1] + 1), list[Tensor]()
    for x, new_SBYHLD in zip(team.views[group].stored, new, strict=True):
        view = x[:, at, :, heads, : n + length]
        view[..., n:, :] = new_SBYHLD[:, rows, at, heads, :length]
        shown += view.unbind(0)
    return shown


def _turn_stored(call: _Call, rows: list[int], slots: Sequence[Slot], k_RHND: Tensor, length: int) -> None:
    """Rotate, in place, stored keys that have no rotation yet: to their own positions, or the places before the new tokens."""
    n = k_RHND.shape[2] - length
    for row, slot, k_HND in zip(rows, slots, k_RHND, strict=bool(n)):
        if n and call.run.is_unrotated(row):
            rope, pos = call.run.ropes[call.layer], call.run.own_positions(row, slot)
            assert rope is not None
            k_HND[:, :n] = rope.range(k_HND[:, :n], call.run.start(row) - n) if pos is None else rope.rotate(k_HND[:, :n], pos)


def _record(call: _Call, rows: list[int], part: _Part, q: Tensor, k: Tensor) -> None:
    """Statistics that each row asked for; a step's column sums are made in one go."""
    needs = [call.run.needs[row] if call.window is None and not call.reads else Needs() for row in rows]
    if not any(needs):
        return
    sums: dict[int, Tensor] = {}
    softmax, pos_RHN, latent = part.softmax, part.pos_RHN, call.run.latent(call.layer)
    heads = part.heads if latent is None else slice(0, k.shape[1])
    if wanted := [i for i, need in enumerate(needs) if need.column_sums]:
        if q.shape[2] == 1:
            group = q.shape[1] // k.shape[1]
            scaled = call.run.pick(call.scaled_BQD, [rows[i] for i in wanted])[:, heads.start * group : heads.stop * group]
            pos = None if pos_RHN is None else call.run.pick(pos_RHN, wanted)
            stored, calls = call.run.pick(k, wanted), call.run.calls(wanted)
            parts = (step_sums(scaled[at], stored[at], softmax, None if pos is None else pos[at]) for at in calls)
            found = [one for sums_RHN in parts for one in sums_RHN]
        else:  # summed block by block, and the size of a block must be the row's own affair
            each = [None] * len(rows) if pos_RHN is None else list(pos_RHN)
            found = [column_sums(q[i], k[i], call.scaling, softmax, each[i]) for i in wanted]
        sums = dict(zip(wanted, found if latent is None else [x.mean(0, keepdim=True) for x in found], strict=True))
    for i, row, need in ((i, row, need) for i, (row, need) in enumerate(zip(rows, needs, strict=True)) if need):
        queries = own(q[i, :, -need.queries :]) if need.queries else None
        rope, start = call.run.query_rope(call.layer), call.run.start(row)
        mean, cov = query_moments(q[i], rope, start) if need.query_moments else (None, None)
        call.run.stats[call.layer][row] = Stats(sums.get(i), queries, call.scaling, mean, cov, softmax)


def _no_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Masks are built per row from what it stores. A tensor for mpt, which converts its mask to bool before it is ignored."""
    return torch.ones(1) if getattr(config, "model_type", None) == "mpt" else None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
