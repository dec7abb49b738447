"""Codebooks of keys or values fitted on calibration text, layer by layer (KVQuant)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.calibrate.calibration_text import CalibrationText, exact_rows, of_role
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.models.load import LM
from harness.stages.codec.codebook import best_points
from harness.stages.limits import Calibration, Codebooks, Fitting

FORMAT = 1  # of the table and of how it is fitted; part of its address
FILE = "codebooks.safetensors"
BINS = 4096  # of the histogram that stands for a layer's numbers between -1 and 1


def codebooks(
    engine: Engine, lm: LM, wanted: Calibration, fitting: Fitting, role: str, *, unrotated: bool = False
) -> Codebooks:
    """Ranges and codebooks of "keys" or "values", fitted the first time they are asked for. unrotated: of keys before RoPE."""
    text = CalibrationText.of(lm, wanted)
    basis: dict[str, object] = {"rope": "pre"} if unrotated else {}
    how = {"format": FORMAT, "role": role, **basis, **fitting.settings}
    tensors, about = text.table(engine, FILE, how, lambda: fitted(engine, text.windows, fitting, role, unrotated=unrotated))
    parts = {what: of_role(tensors, role, what) for what in ("low", "high", "points")}
    return Codebooks(parts["high"], about | basis, parts["low"], parts["points"])


def fitted(
    engine: Engine, windows: Sequence[Sequence[int]], fitting: Fitting, role: str, *, unrotated: bool = False
) -> dict[str, Tensor]:
    """Named ROLE.LAYER.low, .high [h, D] and .points [P], fp32, for every full layer.

    Two prefills a window: one for the ranges, one for what codebooks are fitted to. A channel's range leaves out half of
    `fitting.share` of its numbers at each end.
    """
    windows = [ids for ids in windows if len(ids) > fitting.skip]
    if not windows:
        raise UserError("codec.calibration.tokens is not possible: no more of them than first tokens that stay exact")

    def rows(ids: Sequence[int]) -> dict[str, Tensor]:
        found = exact_rows(engine, ids, unrotated=unrotated)
        return {name: x[:, fitting.skip :].float() for name, x in found if name.startswith(f"{role}.")}

    n = sum(len(ids) - fitting.skip for ids in windows)
    beyond = math.floor(fitting.share / 2 * n + 1e-9) + 1
    ends: dict[str, tuple[Tensor, Tensor]] = {}
    for ids in windows:
        for name, x in rows(ids).items():
            low, high = ends.get(name, (x[:, :0], x[:, :0]))
            low, high = torch.cat((low, x), 1), torch.cat((high, x), 1)
            k = min(beyond, low.shape[1])
            ends[name] = low.topk(k, 1, largest=False).values, high.topk(k, 1).values
    ranges = {name: (low[:, -1], high[:, -1]) for name, (low, high) in ends.items()}
    counts = {name: torch.zeros(BINS, dtype=torch.float64) for name in ranges}
    for ids in windows:
        for name, x in rows(ids).items():
            counts[name] += torch.histc(fitting.units(x, *ranges[name]).cpu(), BINS, -1, 1).double()
    centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) * 2 / BINS - 1
    found: dict[str, Tensor] = {}
    for name, (low, high) in ranges.items():
        points = best_points(centres, counts[name], fitting.size).float()
        found |= {f"{name}.low": low.contiguous().cpu(), f"{name}.high": high.contiguous().cpu(), f"{name}.points": points}
    return found
