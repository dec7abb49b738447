"""What some rows attend to: keys and values as they are stored, or as views show them, and the new tokens behind them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from harness.kv.attending.call import Call, Part
from harness.kv.attending.scratch import Scratch
from harness.kv.head_group import Slot
from harness.kv.shared.spread import Spread
from harness.stages.transfers import places


def read(call: Call, part: Part, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [R, H, N + L, D] of N stored and L new tokens; good until the next call.

    new_k, new_v: [R, H, L, D], rounded to the cache dtype, in the dtype of attention.
    """
    run, length = call.run, new_k.shape[2]
    if part.views is not None:
        k, v = _shown(call, part, length)
    else:
        k, v = with_new(part.slots, new_k, new_v, run.scratch)
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
    (group, at), n, heads = call.run.places[call.layer], part.slots[0].head_group.n, part.heads
    assert part.views is not None
    both = call.run.both.get(group)
    new = [x[None] for x in call.run.new[group]] if both is None else [both]
    rows, shown = slice(part.rows[0], part.rows[-1] + 1), list[Tensor]()
    for x, new_SBYHLD in zip(part.views[group].stored, new, strict=True):
        view = x[:, at, part.at, heads, : n + length]
        view[..., n:, :] = new_SBYHLD[:, rows, at, heads, :length]
        shown += view.unbind(0)
    return shown


def with_new(slots: Sequence[Slot], new_k: Tensor, new_v: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Keys and values that R rows store in one layer, followed by the new ones, [R, H, N + L, D], in the dtype of those."""
    if not slots or not slots[0].head_group.n:
        return new_k, new_v
    k, v = scratch.pair(new_k, new_v, slots[0].head_group.n + new_k.shape[2])
    if len(slots) == 1 and (stored := slots[0].as_stored(new_k.dtype)) is not None:
        torch.cat((*stored[0], new_k[0]), 1, out=k[0])
        torch.cat((*stored[1], new_v[0]), 1, out=v[0])
        return k, v
    _decode([(slot.keys, slot.at) for slot in slots], new_k, k)
    _decode([(slot.values, slot.at) for slot in slots], new_v, v)
    return k, v


def _decode(stored: list[tuple[Spread, slice]], new_RHLD: Tensor, out_RHND: Tensor) -> None:
    """Stored rows and the new ones behind them, written once."""
    n = stored[0][0].n
    for (side, at), one in zip(stored, out_RHND, strict=True):
        side.write_to(one[:, :n], at)
    out_RHND[:, :, n:] = new_RHLD


def _turn_stored(call: Call, part: Part, k_RHND: Tensor, length: int) -> None:
    """Rotate, in place, stored keys that have no rotation yet: to their own positions, or the places before the new tokens."""
    n = k_RHND.shape[2] - length
    for row, slot, k_HND in zip(part.rows, part.slots, k_RHND, strict=bool(n)):
        if n and call.run.is_unrotated(row):
            rope, pos = call.run.ropes[call.layer], call.run.own_positions(row, slot)
            assert rope is not None
            k_HND[:, :n] = rope.range(k_HND[:, :n], call.run.start(row) - n) if pos is None else rope.rotate(k_HND[:, :n], pos)
