"""Codebooks of keys or values fitted on calibration text, layer by layer (KVQuant)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from harness.calibrate.calibration_text import CalibrationText, exact_rows, of_role
from harness.calibrate.gradients import squared_gradients
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
    """Ranges and codebooks of "keys" or "values"; measured the first time they are asked for, whatever the number of points.

    unrotated: of keys before RoPE.
    """
    text = CalibrationText.of(lm, wanted)
    basis: dict[str, object] = {"rope": "pre"} if unrotated else {}
    how = {"format": FORMAT, "role": role, **basis, **fitting.settings}
    tensors, about = text.table(engine, FILE, how, lambda: measured(engine, text.windows, fitting, role, unrotated=unrotated))
    low, high, counts = (of_role(tensors, role, what) for what in ("low", "high", "counts"))
    centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) * 2 / BINS - 1
    points = {layer: best_points(centres, found, fitting.size).float() for layer, found in counts.items()}
    return Codebooks(high, about | basis, low, points)


def measured(
    engine: Engine, windows: Sequence[Sequence[int]], fitting: Fitting, role: str, *, unrotated: bool = False
) -> dict[str, Tensor]:
    """Named ROLE.LAYER.low and .high [h, D], fp32, and .counts [BINS], fp64, of the layer's numbers brought to -1 .. 1.

    A channel's range leaves out half of `fitting.share` of its numbers at each end. Two prefills a window: one for the ranges,
    which codecs without them are spared, and one for the counts; with Fisher weights, which are counted instead of numbers, a
    backward pass too.
    """
    windows = [ids for ids in windows if len(ids) > fitting.skip]
    if not windows:
        raise UserError("codec.calibration.tokens is not possible: no more of them than first tokens that stay exact")

    def rows(ids: Sequence[int]) -> dict[str, Tensor]:
        found = exact_rows(engine, ids, unrotated=unrotated)
        return {name: x[:, fitting.skip :].float() for name, x in found if name.startswith(f"{role}.")}

    ranges: dict[str, tuple[Tensor, Tensor]] = {}
    if fitting.share is not None:
        n = sum(len(ids) - fitting.skip for ids in windows)
        ranges = _ends(map(rows, windows), math.floor(fitting.share / 2 * n + 1e-9) + 1)
    counts: dict[str, Tensor] = {}
    for ids in windows:
        squares = squared_gradients(engine, ids, unrotated=unrotated) if fitting.weights == "fisher" else {}
        for name, x in rows(ids).items():
            fisher = squares[name][:, fitting.skip :] if squares else None
            low, high = ranges.get(name, (None, None))
            new = _histogram(*fitting.units(x, low, high, fisher))
            counts[name] = counts[name] + new if name in counts else new
    if fitting.weights == "fisher":
        _check_sums(counts)
    found = {f"{name}.counts": x for name, x in counts.items()}
    for name, (low, high) in ranges.items():
        found |= {f"{name}.low": low.contiguous().cpu(), f"{name}.high": high.contiguous().cpu()}
    return found


def _histogram(units: Tensor, weights: Tensor | None) -> Tensor:
    """How many numbers fall into each bin, or how much they weigh together, fp64 [BINS]."""
    if weights is None:
        return torch.histc(units.cpu(), BINS, -1, 1).double()
    bins = ((units.cpu() + 1) * (BINS / 2)).long().clamp(max=BINS - 1)
    return torch.bincount(bins, weights.cpu().double(), BINS)


def _check_sums(counts: dict[str, Tensor]) -> None:
    """Refuse (UserError) weights that are too large or too small for the model's dtype."""
    for name, x in counts.items():
        if not 0 < float(x.sum()) < math.inf:
            role, layer = name.split(".")
            raise UserError(
                f"codec.weights='fisher' is not possible: gradients of the {role} of layer {layer} are all 0 or too large for "
                "the model's dtype; legal are model.dtype=float32 or bfloat16, more tokens of text, or weights=plain"
            )


def _ends(windows: Iterable[dict[str, Tensor]], beyond: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(the `beyond`-th smallest, the `beyond`-th largest) number of every channel, by name."""
    ends: dict[str, tuple[Tensor, Tensor]] = {}
    for rows in windows:
        for name, x in rows.items():
            low, high = ends.get(name, (x[:, :0], x[:, :0]))
            low, high = torch.cat((low, x), 1), torch.cat((high, x), 1)
            k = min(beyond, low.shape[1])
            ends[name] = low.topk(k, 1, largest=False).values, high.topk(k, 1).values
    return {name: (low[:, -1], high[:, -1]) for name, (low, high) in ends.items()}
