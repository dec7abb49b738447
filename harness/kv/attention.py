"""Attention over ragged stores, rows of one shape at a time, through transformers' own sdpa or, with a softmax that sdpa lacks,
through ours; it knows no policy and no task.

Registered once under our own name. Whatever the current `Forward` says is attended to and recorded; nothing is evicted here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, MptConfig

from harness.kv import honoured
from harness.kv.attending.call import Call, Part
from harness.kv.attending.grouped import sdpa
from harness.kv.attending.recorded import record
from harness.kv.attending.stored import positions, read
from harness.kv.attention_stats import distances
from harness.kv.families.chunk_masks import in_chunks
from harness.kv.families.softmax_attention import Seen, softmax_attention
from harness.kv.forward import CURRENT
from harness.kv.shared.flat_queries import beside_flat
from harness.kv.teams import Team, in_order
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
    run = CURRENT.get()
    seat = run.enter(module)
    layer = seat.layer
    honoured.check(module, seat.shape, key, value, attention_mask, kwargs)
    softmax, kwargs = honoured.softmax_of(kwargs)
    if seat.temperature is not None:
        query = seat.temperature.of(query, [run.start(row) for row in range(len(run.lengths))])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(module, run, seat, scaling, softmax, kwargs, query)
    if layer in run.handed:
        run.handed.remove(layer)
        call.whole = True
    else:
        if seat.latent is not None:
            # Keys and values of new tokens, as the layer itself expanded them: right unless what is stored was rounded.
            call.given = (key, value) if key.dtype == run.kv_dtype else None
            key, value = seat.latent.parts(key, run.entering.pop(layer))
        key, value = run.kept_new(layer) if seat.reads else run.keep_new(layer, key, value)
    teams = run.alike(layer)
    if len(teams) == 1:  # all rows, of one length
        out = _attend_rows(call, teams[0], query, key, value)
    else:
        every = ((team.rows, run.lengths[team.rows[0]], team) for team in teams)
        outs = [_attend_rows(call, team, *(run.pick(x, rows, n) for x in (query, key, value))) for rows, n, team in every]
        out = in_order(teams, outs, query.shape[2])
    if run.outputs is not None:
        run.outputs[seat.number] = out
    if run.against is not None:
        run.errors[seat.number] = distances(out, run.against[seat.number])
    elif run.reference is not None:
        run.errors[seat.number] = distances(out, out[numbers(tuple(run.reference), out.device)])
    return out, None


def _attend_rows(call: Call, team: Team, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q, D] of rows whose stores have the same shape, part by part; their statistics go to the forward."""
    stores = [call.run.stores[row].get(call.seat.layer, ()) for row in team.rows]
    if len(stores[0]) < 2:  # all heads are one part
        slots = [slot for store in stores for slot in store]
        return _attend_heads(call, Part(team.rows, slice(0, k.shape[1]), slots, call.softmax, team.views), q, k, v)
    outputs, group = [], q.shape[1] // k.shape[1]
    for slots in map(list, zip(*stores, strict=True)):
        heads = slots[0].heads
        queries = slice(heads.start * group, heads.stop * group)
        part = Part(team.rows, heads, slots, call.softmax.of(queries), team.views)
        outputs.append(_attend_heads(call, part, q[:, queries], k[:, heads], v[:, heads]))
    return torch.cat(outputs, 2)


def _attend_heads(call: Call, part: Part, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for one part, q [R, Q', L, D], k and v [R, H', L, D]."""
    if part.slots and part.slots[0].head_group.folded:
        q, k = beside_flat(call.run, call.seat.layer, part.rows, q, k)
    k, v = read(call, part, q.dtype, k, v)
    if part.softmax.positional:
        part.pos_RHN = positions(call, part, k)
    calls = call.run.calls(part.rows)
    if len(calls) == 1:
        out = _output(call, part, q, k, v)
    else:
        out = torch.cat([_output(call, part.of_rows(at), q[at], k[at], v[at]) for at in calls])
    if call.run.asking and call.records(part.rows):
        record(call, part, q, k)
    return out


def _output(call: Call, part: Part, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q', D] of the part's rows, in one call; transformers' own attention has the mask that it would be given."""
    length, shape = q.shape[2], call.seat.shape
    past = k.shape[2] - length
    if not part.softmax.plain:
        return softmax_attention(q, k, v, call.scaling, part.softmax, Seen(past, shape.window, part.pos_RHN))
    mask = call.run.mask(past, length, shape.window, q.device)
    if mask is not None and shape.chunked:
        mask = in_chunks(call.run, mask, part.rows, past, shape)
    return sdpa(call, q, k, v, mask)


def _no_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Masks are built per row from what it stores. A tensor for mpt, which converts its mask to bool before it is ignored."""
    return torch.ones(1) if isinstance(config, MptConfig) else None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
