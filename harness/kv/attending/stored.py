"""What some rows attend to: keys and values as they are stored, or as views show them, and the new tokens behind them."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor

from harness.kv.attending.call import Call, Part
from harness.kv.forward import Forward
from harness.kv.head_group import with_new
from harness.stages.transfers import places


def read(call: Call, part: Part, dtype: torch.dtype, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [R, H, N + L, D], in `dtype`, of N stored tokens and of the new ones, [R, H, L, D]."""
    if call.whole:
        return new_k, new_v
    (k, v), latent = held(call.run, call.seat.layer, part, dtype, new_k, new_v), call.seat.latent
    return (k, v) if latent is None else call.expanded(latent, part.rows, k, v, new_k.shape[2])


def held(run: Forward, layer: int, part: Part, dtype: torch.dtype, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    """The same without expanding latents."""
    length = new_k.shape[2]
    if part.views is not None:
        return _shown(run, layer, part, length)
    k, v = with_new(part.slots, new_k.to(dtype), new_v.to(dtype))
    if run.turns:
        _turn_stored(run, layer, part, k, length)
    return k, v


def positions(call: Call, part: Part, k_RHND: Tensor) -> Tensor:
    """Positions [R, H, N + L] of stored and new tokens, which a softmax with position biases looks at."""
    (_, h, n, _), run = k_RHND.shape, call.run
    found = []
    for row, slot in zip_longest(part.rows, part.slots):
        new = places(run.start(row), n - (slot.head_group.n if slot else 0), k_RHND.device).expand(h, -1)
        found.append(torch.cat((slot.positions(run.seen[row]), new), 1) if slot else new)
    return torch.stack(found)


def _shown(run: Forward, layer: int, part: Part, length: int) -> tuple[Tensor, Tensor]:
    """From views: K and V of some heads, the new tokens written behind the stored ones."""
    (group, at), stored = run.places[layer], part.slots[0].head_group
    assert part.views is not None
    views = part.views[group]
    k, v, places = views.span(at, stored.n, length, alike=stored.heads.layers == views.layers)
    some = part.heads.stop - part.heads.start < k.shape[1]
    to_copy = run.new[group].to_copy
    for place, new in zip(places, to_copy[at], strict=True) if to_copy else ():  # [2 or 1, rows, H, tokens, D]
        if some:
            place, new = place[:, :, part.heads], new[:, :, part.heads]
        if len(part.rows) < new.shape[1]:
            new = new[:, part.rows[0] : part.rows[-1] + 1]
        place.copy_(new if length == new.shape[3] else new.narrow(3, 0, length))
    return (k[:, part.heads], v[:, part.heads]) if some else (k, v)


def _turn_stored(run: Forward, layer: int, part: Part, k_RHND: Tensor, length: int) -> None:
    """Rotate, in place, stored keys that have no rotation yet: to their own positions, or the places before the new tokens."""
    n = k_RHND.shape[2] - length
    for row, slot, k_HND in zip(part.rows, part.slots, k_RHND, strict=bool(n)):
        if n and run.is_unrotated(row):
            rope, pos = run.ropes[layer], run.own_positions(row, slot)
            assert rope is not None
            k_HND[:, :n] = rope.range(k_HND[:, :n], run.start(row) - n) if pos is None else rope.rotate(k_HND[:, :n], pos)
