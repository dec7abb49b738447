"""Attention over ragged stores, rows of one shape at a time, through transformers' own sdpa; it knows no policy and no task.

Registered once under our own name. Whatever the current `Forward` says is attended to and recorded; nothing is evicted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.kv.layer import LayerStore, Side
from harness.kv.shape import ModelShape
from harness.kv.statistics import column_sums
from harness.stages.protocols import Needs, Stats
from harness.types import KV

NAME = "kv_harness"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass
class Forward:
    """One forward of B rows: what each row has stored, how many of its L query tokens are real, what to record.

    After the forward, `new` holds every row's new K and V per layer and `stats` what was recorded, both as [layer][row].
    """

    shape: ModelShape
    stores: Sequence[Sequence[LayerStore]]  # [row][layer]
    seen: Sequence[int]
    lengths: Sequence[int]
    needs: Sequence[Needs]
    kv_dtype: torch.dtype
    reference: Sequence[int] | None = None  # for every row, the row whose attention output it is compared with
    errors: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # [layer][row]: |out - ref|^2, |ref|^2
    new: dict[int, list[KV]] = field(default_factory=dict)
    stats: dict[int, list[list[Stats]]] = field(default_factory=dict)  # [layer][row][part]
    masks: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)
    picks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    new_pos: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

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

    def alike(self, layer: int) -> list[list[int]]:
        """Batch rows whose stores have the same shape in a layer, and as many new tokens: they attend in one call."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row, n in enumerate(self.lengths):
            shape = tuple((part.start, part.stop, part.n) for part in self.stores[row][layer])
            groups.setdefault((n, *shape), []).append(row)
        return list(groups.values())

    def pick(self, x: Tensor, rows: list[int]) -> Tensor:
        """The batch rows `rows` of x; a view where they are all of x or a single one."""
        if len(rows) == 1 or len(rows) == x.shape[0]:
            return x[rows[0] : rows[0] + len(rows)]
        key = (*rows, x.device)
        if key not in self.picks:
            self.picks[key] = torch.tensor(rows, device=x.device)
        return x.index_select(0, self.picks[key])

    def positions(self, row: int, device: torch.device) -> Tensor:
        """int32 [L] original positions of a row's new tokens."""
        if (row, device) not in self.new_pos:
            start = self.seen[row]
            self.new_pos[row, device] = torch.arange(start, start + self.lengths[row], dtype=torch.int32, device=device)
        return self.new_pos[row, device]


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
    assert layer not in run.new, f"layer {layer} attended twice in one forward"
    call = _Call(module, run, layer, query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs)
    _refuse_unsupported(kwargs, call.window)
    run.new[layer] = [_new_rows(run, row, key[row, :, :n], value[row, :, :n]) for row, n in enumerate(run.lengths)]
    run.stats[layer] = [[] for _ in run.lengths]
    outputs: list[Tensor] = [query] * len(run.lengths)
    for rows in run.alike(layer):
        n = run.lengths[rows[0]]
        out = _attend_rows(call, rows, *(run.pick(x, rows)[:, :, :n] for x in (query, key, value)))
        if n < query.shape[2]:
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, query.shape[2] - n))
        for i, row in enumerate(rows):
            outputs[row] = out[i : i + 1]
    if run.reference is not None:
        run.errors[layer] = [_distance(out, outputs[at]) for out, at in zip(outputs, run.reference, strict=True)]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)), None


def _distance(out: Tensor, reference: Tensor) -> tuple[float, float]:
    return float((out.float() - reference.float()).square().sum()), float(reference.float().square().sum())


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


def _attend_rows(call: _Call, rows: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output [R, L, Q, D] of rows whose stores have the same shape, part by part; their statistics go to the forward."""
    run, outputs = call.run, []
    group, length = q.shape[1] // k.shape[1], k.shape[2]
    stores = [run.stores[row][call.layer] for row in rows]
    for parts in zip(*stores, strict=True) if stores[0] else [()]:
        heads = slice(parts[0].start, parts[0].stop) if parts else slice(0, k.shape[1])
        part_q = q[:, heads.start * group : heads.stop * group]
        all_k = _joined([part.keys for part in parts], k[:, heads])
        all_v = _joined([part.values for part in parts], v[:, heads])
        mask = run.mask(all_k.shape[2] - length, length, call.window)
        mask = mask if mask is None else mask.to(q.device)
        out, _ = sdpa_attention_forward(call.module, part_q, all_k, all_v, mask, scaling=call.scaling, **call.kwargs)
        outputs.append(out)
        _record(call, rows, part_q, all_k)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _joined(stored: list[Side], new_RHLD: Tensor) -> Tensor:
    """Stored rows followed by the new ones, [R, H, N + L, D], decoded to the compute dtype; written once."""
    if not stored or not stored[0].n:
        return new_RHLD
    (r, h, length, d), n = new_RHLD.shape, stored[0].n
    out = new_RHLD.new_empty(r, h, n + length, d)
    for side, one in zip(stored, out, strict=True):
        side.write_to(one[:, :n])
    out[:, :, n:] = new_RHLD
    return out


def _record(call: _Call, rows: list[int], q: Tensor, k: Tensor) -> None:
    """Statistics that each row asked for; rows that want column sums are summed in one go."""
    needs = [call.run.needs[row] if call.window is None else Needs() for row in rows]
    sums: dict[int, Tensor] = {}
    if wanted := [i for i, need in enumerate(needs) if need.column_sums]:
        flat = column_sums(call.run.pick(q, wanted).flatten(0, 1), call.run.pick(k, wanted).flatten(0, 1), call.scaling)
        sums = dict(zip(wanted, flat.unflatten(0, (len(wanted), -1)), strict=True))  # type: ignore[no-untyped-call]
    for i, (row, need) in enumerate(zip(rows, needs, strict=True)):
        queries = q[i, :, -need.queries :].clone() if need.queries else None
        own = sums.get(i)
        if own is not None and len(wanted) > 1:
            own = own.clone()  # a view would keep the other rows' sums alive
        call.run.stats[call.layer][row].append(Stats(own, queries, call.scaling))


def _new_rows(run: Forward, row: int, k_HLD: Tensor, v_HLD: Tensor) -> KV:
    """The new rows in the cache dtype, in storages of their own size (a view of a fused projection would hold it all)."""
    heads, n = k_HLD.shape[:2]
    pos = run.positions(row, k_HLD.device).expand(heads, n)
    k, v = (x.to(run.kv_dtype, copy=True, memory_format=torch.contiguous_format) for x in (k_HLD, v_HLD))
    return KV(k, v, pos)


def _refuse_unsupported(kwargs: dict[str, Any], window: int | None) -> None:
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"the model's attention uses {name}, which this harness would not honour")
    sliding = kwargs.get("sliding_window")
    if sliding is not None and window is not None and sliding != window:
        raise NotImplementedError(f"the model asks for a window of {sliding} in a layer whose cache holds {window}")


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Masks are built per row from what it stores."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _no_mask)
