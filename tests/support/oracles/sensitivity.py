"""How far attention outputs move when a cache holds other numbers, one query head and one query at a time."""

from __future__ import annotations

import torch

from harness.engine.answers import Prefix
from harness.kv.sequence_cache import SequenceCache


def moved_outputs(whole: Prefix, changed: SequenceCache, layer: int) -> tuple[float, float]:
    """(|o' - o|^2, |o|^2) of the recorded queries of a layer, fp64; `changed` holds the same tokens, read otherwise."""
    sides = []
    for row in (whole.row, changed):
        ((part, at),) = row.slots[layer]
        sides.append([getattr(part, role).read(torch.float32, at).double() for role in ("keys", "values")])
    queries = whole.stats[layer].queries_QWD
    assert queries is not None
    heads, window = queries.shape[:2]
    error = total = 0.0
    for head in range(heads):
        h = head // (heads // len(sides[0][0]))
        for w in range(window):
            end, query = sides[0][0].shape[1] - window + w + 1, queries[head, w].double() * whole.stats[layer].scaling
            out = [(k[h, :end] @ query).softmax(0) @ v[h, :end] for k, v in sides]
            error += float((out[1] - out[0]).square().sum())
            total += float(out[0].square().sum())
    return error, total
