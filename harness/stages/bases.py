"""Bases of keys or values: what a low-rank codec asks to have found on a text or on weights, and what was found.

`harness.calibrate.low_rank_bases` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.errors import UserError
from harness.stages.encoded import Heads
from harness.stages.limits import Limits


@dataclass(frozen=True)
class Span:
    """What a basis is to span. heads: how many KV heads of a layer share one; None for all.

    of: "text", keys or values of calibration text; "weights", the rows of the layer's own projection. skip: first tokens of a
    window of text that do not count.
    """

    heads: int | None
    of: str
    skip: int = 0


@dataclass(frozen=True)
class Bases(Limits):
    """For every layer its orthonormal bases, fp32 [sets, s * D, s * D] for sets of s heads side by side, as by_layer.

    A basis has its vectors in columns, by falling energy. energy: fp32 [sets, s * D], the squared length along each of them.
    """

    energy: Mapping[int, Tensor] = field(default_factory=dict)

    def of_heads(self, heads: Heads, s: int, d: int, rank: int) -> Tensor:
        """The first `rank` vectors of the bases of these heads [H, D, rank]; UserError if they do not fit."""
        missing = [layer for layer in heads.layers if layer not in self.by_layer]
        if missing:
            raise UserError(f"the calibration table has no layer {missing[0]}")
        sets = slice(heads.start // s, heads.stop // s)
        found = torch.cat([self.by_layer[layer][sets, :, :rank] for layer in heads.layers])
        if found.shape != (heads.n // s, s * d, rank):
            raise UserError(f"the calibration table holds bases {tuple(found.shape)} for {heads.n} heads of {d} channels")
        return found.reshape(heads.n, d, rank)

    def held(self) -> Tensor:
        """Share of the energy that the first 1, 2, ... vectors hold, fp64 [s * D]: the mean over all sets and layers."""
        cumulated = torch.cat([one.double().cumsum(-1) for one in self.energy.values()])
        return (cumulated / cumulated[:, -1:].clamp(min=torch.finfo(torch.float64).tiny)).mean(0)


def principal(moment_SCC: Tensor) -> tuple[Tensor, Tensor]:
    """(orthonormal bases fp32 [S, C, C], energies fp32 [S, C]) of second moments, by falling energy.

    These are the right singular vectors of what the moments are of, and its squared singular values. The largest component of
    every vector is positive, so that a basis does not depend on the sign that a library gives it.
    """
    energy, vectors = torch.linalg.eigh(moment_SCC.double().cpu())
    energy, vectors = energy.flip(-1).clamp(min=0), vectors.flip(-1)
    largest = vectors.abs().argmax(-2, keepdim=True)
    vectors = vectors * torch.where(vectors.gather(-2, largest) < 0, -1.0, 1.0)
    return vectors.float().contiguous(), energy.float()
