"""Attention over ragged stores, one batch row at a time, through transformers' own sdpa; it knows no policy and no task.

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

from harness.kv.layer import LayerStore, Part
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
    run.new[layer], run.stats[layer], outputs = [], [], []
    for row, n in enumerate(run.lengths):
        q, k, v = query[row : row + 1, :, :n], key[row, :, :n], value[row, :, :n]
        run.new[layer].append(_new_rows(run, row, k, v))
        out, stats = _attend_row(call, row, q, k, v)
        run.stats[layer].append(stats)
        outputs.append(out if n == query.shape[2] else torch.nn.functional.pad(out, (0, 0, 0, 0, 0, query.shape[2] - n)))
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


def _attend_row(call: _Call, row: int, q: Tensor, k_HLD: Tensor, v_HLD: Tensor) -> tuple[Tensor, list[Stats]]:
    """One row's output [1, L, Q, D] and statistics, part by part: a part's heads hold the same number of rows."""
    outputs, stats, run = [], [], call.run
    group = q.shape[1] // k_HLD.shape[0]
    needs = run.needs[row] if call.window is None else Needs()
    for part in run.stores[row][call.layer] or (None,):
        heads = slice(part.start, part.stop) if part else slice(0, k_HLD.shape[0])
        part_q = q[:, heads.start * group : heads.stop * group]
        k, v = _joined(part, k_HLD[heads], v_HLD[heads])
        mask = run.mask(k.shape[1] - k_HLD.shape[1], k_HLD.shape[1], call.window)
        mask = mask if mask is None else mask.to(q.device)
        out, _ = sdpa_attention_forward(call.module, part_q, k[None], v[None], mask, scaling=call.scaling, **call.kwargs)
        outputs.append(out)
        stats.append(_record(needs, part_q[0], k, call.scaling))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)), stats


def _joined(part: Part | None, k_HLD: Tensor, v_HLD: Tensor) -> tuple[Tensor, Tensor]:
    """Stored rows followed by the new ones, [H, N + L, D], decoded to the compute dtype; one copy."""
    if part is None or not part.n:
        return k_HLD, v_HLD
    return part.keys.read(k_HLD.dtype, k_HLD), part.values.read(v_HLD.dtype, v_HLD)


def _new_rows(run: Forward, row: int, k_HLD: Tensor, v_HLD: Tensor) -> KV:
    """The new rows in the cache dtype, in storages of their own size (a view of a fused projection would hold it all)."""
    heads, n = k_HLD.shape[:2]
    pos = run.positions(row, k_HLD.device).expand(heads, n)
    return KV(_compact(k_HLD.to(run.kv_dtype)), _compact(v_HLD.to(run.kv_dtype)), pos)


def _compact(x: Tensor) -> Tensor:
    tight = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if tight else x.clone(memory_format=torch.contiguous_format)


def _record(needs: Needs, q_QLD: Tensor, k_HND: Tensor, scaling: float) -> Stats:
    sums = column_sums(q_QLD, k_HND, scaling) if needs.column_sums else None
    queries = q_QLD[:, -needs.queries :].clone() if needs.queries else None
    return Stats(sums, queries, scaling)


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
