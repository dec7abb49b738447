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
from transformers import AttentionInterface, AttentionMaskInterface, MptConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.kv import honoured
from harness.kv.attention_stats import column_sums, distances, query_moments, step_sums
from harness.kv.families.chunk_masks import in_chunks
from harness.kv.families.latent import Latent
from harness.kv.families.softmax_attention import Seen, softmax_attention
from harness.kv.families.temperature import temperature_of
from harness.kv.forward import CURRENT, Forward
from harness.kv.head_group import Slot, with_new
from harness.kv.shape import LayerShape
from harness.kv.shared.flat_queries import beside_flat
from harness.kv.teams import Team, in_order
from harness.kv.token_store import own
from harness.stages.protocols import Stats
from harness.stages.softmax import Softmax
from harness.stages.transfers import numbers, places

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
    layer, reads = run.enter(number)
    shape, latent = run.shape.layers[layer], run.latent(layer)
    honoured.check(module, shape, key, value, attention_mask, kwargs)
    softmax, kwargs = honoured.softmax_of(kwargs)
    if (temperature := temperature_of(module)) is not None:
        query = temperature.of(query, [run.start(row) for row in range(len(run.lengths))])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = _Call(module, run, layer, shape, scaling, softmax, kwargs, query, reads, latent)
    if latent is not None:
        # Keys and values of new tokens, as the layer itself expanded them: right unless what is stored was rounded.
        call.given = (key, value) if key.dtype == run.kv_dtype else None
        key, value = latent.parts(key, run.entering.pop(layer))
    key, value = run.kept_new(layer) if reads else run.keep_new(layer, key, value)
    teams = run.alike(layer)
    if len(teams) == 1:  # all rows, of one length
        out = _attend_rows(call, teams[0], query, key, value)
    else:
        every = ((team.rows, run.lengths[team.rows[0]], team) for team in teams)
        outs = [_attend_rows(call, team, *(run.pick(x, rows, n) for x in (query, key, value))) for rows, n, team in every]
        out = in_order(teams, outs, query.shape[2])
    if run.outputs is not None:
        run.outputs[number] = out
    if run.against is not None:
        run.errors[number] = distances(out, run.against[number])
    elif run.reference is not None:
        run.errors[number] = distances(out, out[numbers(tuple(run.reference), out.device)])
    return out, None


@dataclass(eq=False)
class _Call:
    """What all rows of one layer's attention share."""

    module: torch.nn.Module
    run: Forward
    layer: int
    shape: LayerShape
    scaling: float
    softmax: Softmax
    kwargs: dict[str, Any]
    query: Tensor
    reads: bool  # the store of another layer, in whose statistics only its own queries count
    latent: Latent | None
    given: tuple[Tensor, Tensor] | None = None

    @cached_property
    def scaled_BQD(self) -> Tensor:
        """A single new query of every row times the scaling, fp32."""
        return self.query[:, :, 0].float() * self.scaling

    def expanded(self, latent: Latent, rows: list[int], k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H', N + L, D'] of what is stored and new, parts of latents [R, 1, N + L, D]."""
        if self.given is not None and k.shape[2] == length:
            key, value = (self.run.pick(x, rows)[:, :, :length] for x in self.given)
            return key, value
        return latent.expand(k, v)


@dataclass(eq=False)
class _Part:
    """Some KV heads of a layer, where R rows store them (nowhere before the first token), and the softmax of their queries.

    pos_RHN: positions of their keys, if the softmax looks at them.
    """

    heads: slice
    slots: Sequence[Slot]
    softmax: Softmax
    pos_RHN: Tensor | None = None

    def of(self, rows: slice) -> _Part:
        """The same for some of the rows."""
        return self if self.pos_RHN is None else replace(self, pos_RHN=self.pos_RHN[rows])


def _attend_rows(call: _Call, team: Team, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q, D] of rows whose stores have the same shape, part by part; their statistics go to the forward."""
    stores = [call.run.stores[row].get(call.layer, ()) for row in team.rows]
    if len(stores[0]) < 2:  # all heads are one part
        slots = [slot for store in stores for slot in store]
        return _attend_heads(call, team, _Part(slice(0, k.shape[1]), slots, call.softmax), q, k, v)
    outputs, group = [], q.shape[1] // k.shape[1]
    for slots in map(list, zip(*stores, strict=True)):
        heads = slots[0].heads
        queries = slice(heads.start * group, heads.stop * group)
        part = _Part(heads, slots, call.softmax.of(queries))
        outputs.append(_attend_heads(call, team, part, q[:, queries], k[:, heads], v[:, heads]))
    return torch.cat(outputs, 2)


def _attend_heads(call: _Call, team: Team, part: _Part, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for one part, q [R, Q', L, D], k and v [R, H', L, D]."""
    run, length = call.run, q.shape[2]
    q, k = beside_flat(run, call.layer, team.rows, part.slots, q, k)
    if team.views is not None:
        k, v = _shown(call, team, part, length)
    else:
        k, v = with_new(part.slots, k.to(q.dtype), v.to(q.dtype))
        if run.turns:
            _turn_stored(call, team.rows, part.slots, k, length)
    if call.latent is not None:
        k, v = call.expanded(call.latent, team.rows, k, v, length)
    if part.softmax.positional:
        part.pos_RHN = _positions(call, team.rows, part.slots, k)
    calls = run.calls(team.rows)
    if len(calls) == 1:
        out = _output(call, team.rows, part, q, k, v)
    else:
        out = torch.cat([_output(call, team.rows[at], part.of(at), q[at], k[at], v[at]) for at in calls])
    if run.records and call.shape.window is None and not call.reads:
        _record(call, team.rows, part, q, k)
    return out


def _output(call: _Call, rows: list[int], part: _Part, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q', D] of some heads of these rows, in one call."""
    if part.softmax.plain:
        return _sdpa(call, rows, q, k, v)
    seen = Seen(k.shape[2] - q.shape[2], call.shape.window, part.pos_RHN)
    return softmax_attention(q, k, v, call.scaling, part.softmax, seen)


def _sdpa(call: _Call, rows: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Transformers' own attention, with the mask that it would be given."""
    length = q.shape[2]
    past = k.shape[2] - length
    mask = call.run.mask(past, length, call.shape.window, q.device)
    if mask is not None and call.shape.chunked:
        mask = in_chunks(call.run, mask, rows, past, call.shape)
    out: Tensor = sdpa_attention_forward(call.module, q, k, v, mask, scaling=call.scaling, **call.kwargs)[0]
    return out


def _positions(call: _Call, rows: list[int], slots: Sequence[Slot], k_RHND: Tensor) -> Tensor:
    """Positions [R, H, N + L] of stored and new tokens, which a softmax with position biases looks at."""
    (_, h, n, _), run = k_RHND.shape, call.run
    found = []
    for row, slot in zip_longest(rows, slots):
        new = places(run.start(row), n - (slot.head_group.n if slot else 0), k_RHND.device).expand(h, -1)
        found.append(torch.cat((slot.positions(run.seen[row]), new), 1) if slot else new)
    return torch.stack(found)


def _shown(call: _Call, team: Team, part: _Part, length: int) -> list[Tensor]:
    """From views: K and V [R, H, N + L, D] of some heads, the new tokens written behind the N stored ones."""
    (group, at), n, heads = call.run.places[call.layer], part.slots[0].head_group.n, part.heads
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
    needs, sums = [call.run.needs[row] for row in rows], dict[int, Tensor]()
    softmax, pos_RHN, latent = part.softmax, part.pos_RHN, call.latent
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
    return torch.ones(1) if isinstance(config, MptConfig) else None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
