"""What some rows attend to: keys and values as they are stored, or as views show them, and the new tokens behind them."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor

from harness.kv.attending.call import Call, Part
from harness.kv.head_group import with_new
from harness.stages.transfers import places


def read(call: Call, part: Part, dtype: torch.dtype, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [R, H, N + L, D], in `dtype`, of N stored tokens and of the new ones, [R, H, L, D]."""
    run, length = call.run, new_k.shape[2]
    if part.views is not None:
        k, v = _shown(call, part, length)
    else:
        k, v = with_new(part.slots, new_k.to(dtype), new_v.to(dtype))
        if run.turns:
            _turn_stored(call, part, k, length)
    if call.latent is not None:
        k, v = call.expanded(call.latent, part.rows, k, v, length)
    return k, v


def positions(call: Call, part: Part, k_RHND: Tensor) -> Tensor:
    """Positions [R, H, N + L] of stored and new tokens, which a softmax with position biases looks at."""
    (_, h, n, _), run = k_RHND.shape, call.run
    found = []
    for row, slot in zip_longest(part.rows, part.slots):
        new = places(run.start(row), n - (slot.head_group.n if slot else 0), k_RHND.device).expand(h, -1)
        found.append(torch.cat((slot.positions(run.seen[row]), new), 1) if slot else new)
    return torch.stack(found)


def _shown(call: Call, part: Part, length: int) -> list[Tensor]:
    """From views: K and V of some heads, the new tokens written behind the stored ones."""
    (group, at), n, shown = call.run.places[call.layer], part.slots[0].head_group.n, list[Tensor]()
    assert part.views is not None
    views = part.views[group]
    for view, new in zip(views.layer(at), call.run.fresh[group][at], strict=True):  # [2 or 1, rows, H, tokens, D]
        if part.heads.stop - part.heads.start < new.shape[2]:
            view, new = view[:, :, part.heads], new[:, :, part.heads]
        if len(part.rows) < new.shape[1]:
            new = new[:, part.rows[0] : part.rows[-1] + 1]
        view = view.narrow(3, views.start, n + length)
        view.narrow(3, n, length).copy_(new if length == new.shape[3] else new.narrow(3, 0, length))
        shown += view.unbind(0)
    return shown


def _turn_stored(call: Call, part: Part, k_RHND: Tensor, length: int) -> None:
    """Rotate, in place, stored keys that have no rotation yet: to their own positions, or the places before the new tokens."""
    n = k_RHND.shape[2] - length
    for row, slot, k_HND in zip(part.rows, part.slots, k_RHND, strict=bool(n)):
        if n and call.run.is_unrotated(row):
            rope, pos = call.run.ropes[call.layer], call.run.own_positions(row, slot)
            assert rope is not None
            k_HND[:, :n] = rope.range(k_HND[:, :n], call.run.start(row) - n) if pos is None else rope.rotate(k_HND[:, :n], pos)
