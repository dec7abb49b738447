"""Masks of chunked attention (llama4): a window that starts anew at each multiple of its size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.kv.forward import Forward
from harness.kv.shape import LayerShape


def in_chunks(run: Forward, allowed: Tensor, rows: Sequence[int], past: int, layer: LayerShape) -> Tensor:
    """A window's mask [1, 1, L, past + L] cut at the chunks of each row's own positions, [R, 1, L, past + L]."""
    window, n = layer.window or 1, allowed.shape[-1]
    cut = {}
    for start in {run.seen[row] % window for row in rows}:
        key = ("chunks", start, past, n, window, allowed.device)
        if key not in run.picks:
            chunk_N = torch.arange(start - past + window, start - past + window + n, device=allowed.device) // window
            run.picks[key] = allowed & (chunk_N[past:, None] == chunk_N)
        cut[start] = run.picks[key]
    return run.picks[key] if len(cut) == 1 else torch.cat([cut[run.seen[row] % window] for row in rows])
