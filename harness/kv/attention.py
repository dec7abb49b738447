"""Attention over ragged stores, rows of one shape at a time, through transformers' own sdpa; it knows no policy and no task.

Registered once under our own name. Whatever the current `Forward` says is attended to and recorded; nothing is evicted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.kv import honoured
from harness.kv.attention_stats import column_sums, query_moments, step_sums
from harness.kv.forward import CURRENT, Forward
from harness.kv.shared.spread import Spread
from harness.kv.teams import Team
from harness.kv.token_store import own
from harness.stages.protocols import Needs, Stats

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
    run, layer = CURRENT.get(), int(module.layer_idx)  # type: ignore[arg-type]
    honoured.refuse(layer in run.stats, f"its layer {layer} attends twice in one forward")
    honoured.check(module, run.shape.layers[layer], key, value, attention_mask, kwargs)
    call = _Call(module, run, layer, query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs, query)
    key, value = run.keep_new(layer, key, value)
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
    query: Tensor

    @cached_property
    def scaled_BQD(self) -> Tensor:
        """A single new query of every row times the scaling, fp32."""
        return self.query[:, :, 0].float() * self.scaling

    @property
    def window(self) -> int | None:
        return self.run.shape.layers[self.layer].window


def _attend_rows(call: _Call, team: Team, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q, D] of rows whose stores have the same shape, part by part; their statistics go to the forward."""
    run, rows, outputs = call.run, team.rows, []
    group, length = q.shape[1] // k.shape[1], k.shape[2]
    stores = [run.stores[row].get(call.layer, ()) for row in rows]
    for slots in zip(*stores, strict=True) if stores[0] else [()]:
        heads = slots[0].heads if slots else slice(0, k.shape[1])
        part_q = q[:, heads.start * group : heads.stop * group]
        if team.views is not None:
            all_k, all_v = _shown(call, team, slots[0].head_group.n, heads, length)
        else:
            all_k = _joined([(slot.keys, slot.at) for slot in slots], k[:, heads].to(q.dtype))
            all_v = _joined([(slot.values, slot.at) for slot in slots], v[:, heads].to(q.dtype))
            _turn_stored(call, rows, all_k, length)
        mask = run.mask(all_k.shape[2] - length, length, call.window)
        mask = mask if mask is None else mask.to(q.device)
        out, _ = sdpa_attention_forward(call.module, part_q, all_k, all_v, mask, scaling=call.scaling, **call.kwargs)
        outputs.append(out)
        _record(call, rows, heads, part_q, all_k)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


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


def _joined(stored: list[tuple[Spread, slice]], new_RHLD: Tensor) -> Tensor:
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


def _record(call: _Call, rows: list[int], heads: slice, q: Tensor, k: Tensor) -> None:
    """Statistics that each row asked for; a step's column sums are made in one go."""
    needs = [call.run.needs[row] if call.window is None else Needs() for row in rows]
    if not any(needs):
        return
    sums: dict[int, Tensor] = {}
    if wanted := [i for i, need in enumerate(needs) if need.column_sums]:
        if q.shape[2] == 1:
            group = q.shape[1] // k.shape[1]
            scaled = call.run.pick(call.scaled_BQD, [rows[i] for i in wanted])[:, heads.start * group : heads.stop * group]
            found: Sequence[Tensor] = list(step_sums(scaled, call.run.pick(k, wanted)))
        else:  # summed block by block, and the size of a block must be the row's own affair
            found = [column_sums(q[i], k[i], call.scaling) for i in wanted]
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
