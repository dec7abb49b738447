"""Codebooks of a few numbers: the best one for a distribution, the nearest number of each element, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.stages.codec.packing import unpack

ROUNDS = 2000  # of Lloyd's iteration, at most


def best_points(values_P: Tensor, weights_P: Tensor, size: int) -> Tensor:
    """The `size` points of least mean squared error for a weighted distribution, fp64, ascending (Lloyd, Max: k-means in 1-D).

    values_P: ascending. weights_P: 0 or more, with a sum above 0. Starts where a fine codebook would have its points (density
    to the power 1/3) and ends where no point moves; for a density whose logarithm is concave no other codebook is better.
    """
    values, weights = values_P.double(), weights_P.double()
    mass, moment = (torch.cat((x.new_zeros(1), x.cumsum(0))) for x in (weights, weights * values))
    fine = weights.pow(1 / 3).cumsum(0)
    wanted = (torch.arange(size, dtype=torch.float64) + 0.5) / size * fine[-1]
    points = values[torch.searchsorted(fine, wanted).clamp(max=len(values) - 1)]
    ends = torch.tensor([0, len(values)])
    for _ in range(ROUNDS):
        cuts = torch.searchsorted(values, midpoints(points))
        cuts = torch.cat((ends[:1], cuts, ends[1:]))
        held = mass[cuts].diff()
        moved = torch.where(held > 0, moment[cuts].diff() / held.clamp(min=1e-300), points)
        if float((moved - points).abs().max()) < 1e-12:
            break
        points = moved
    return points


def midpoints(points: Tensor) -> Tensor:
    """Where the nearest point changes, [..., size - 1]."""
    return (points[..., 1:] + points[..., :-1]) / 2


def nearest(x: Tensor, points_P: Tensor) -> Tensor:
    """uint8 codes of the nearest points, of the lower one in the middle."""
    return counted_below(x, midpoints(points_P))


def counted_below(x: Tensor, cuts_K: Tensor) -> Tensor:
    """How many of a few rising cuts lie below each number, uint8.

    On a CPU each cut is a pass over numbers that stay in its cache, several times as fast as a search for every number.
    """
    if x.device.type != "cpu":
        return torch.bucketize(x, cuts_K, out_int32=True).to(torch.uint8)
    found = torch.zeros(x.shape, dtype=torch.uint8)
    for cut in cuts_K.tolist():
        found += x > cut
    return found


def looked_up(packed: Tensor, bits: int, points_P: Tensor, d: int) -> Tensor:
    """Packed codes [..., P] -> the numbers they stand for [..., d], in the dtype of the points.

    Looks up whole bytes, each of which holds several codes, where codes do not cross bytes.
    """
    if bits == 3:
        codes = unpack(packed, bits, d)
        return points_P.index_select(0, codes.flatten().int()).view(codes.shape)
    per = 8 // bits
    every = torch.arange(256, dtype=torch.uint8, device=packed.device)[:, None]
    table = points_P[unpack(every, bits, per).long()]  # [256, codes of a byte]
    found = table.index_select(0, packed.flatten().int())
    return found.view(*packed.shape[:-1], packed.shape[-1] * per)[..., :d]
