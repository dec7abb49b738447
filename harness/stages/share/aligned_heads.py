"""KV heads turned towards each other before they are averaged."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.limits import Calibration
from harness.stages.share.pooled_heads import PooledHeads
from harness.stages.share.sharing import Bases, Measured

ROUNDS = 20  # of alternating between the mean and the rotations towards it


@dataclass(frozen=True, kw_only=True)
class AlignedHeads(PooledHeads):
    """PooledHeads, with an orthogonal matrix for every head that brings it closest to its group's mean on calibration text
    (generalized Procrustes analysis, Gower 1975; for heads of trained models: arXiv 2412.20677).

    Head h is stored as the mean of x_h @ A_h over its group, and read as mean @ A_h^T. Turning back is exact: A_h also turns
    queries and outputs, which change no score and no output, so with one head in a group nothing is lost. A_h acts on stored
    keys, after RoPE; it does not commute with rotations, so it belongs to the cache, is stored with it in the cache dtype, and
    counted once. Values' matrices could be folded into the weights; they are counted here too. Differs from that paper: its
    matrices for keys turn RoPE's pairs of channels only, so that they too fold into weights, and it trains the merged heads.
    """

    calibration: Calibration | None = None
    measured: Measured | None = field(default=None, repr=False, compare=False)  # set by `fitted`

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.calibration is not None, "share.calibration", None, "the text on which heads are aligned")

    @property
    def aligned(self) -> bool:
        return True

    def fitted(self, measured: Measured) -> AlignedHeads:
        """Itself with the bases [H, D, D] named keys.LAYER and values.LAYER."""
        return replace(self, measured=measured)

    def bases(self, layer: int, heads: int, d_key: int, d_value: int) -> Bases | None:
        assert self.measured is not None, "its bases are measured before anything is stored"
        keys, values = (
            self.measured.basis(f"keys.{layer}", heads, d_key),
            self.measured.basis(f"values.{layer}", heads, d_value),
        )
        return Bases(keys, values)

    def info(self) -> dict[str, object]:
        about = {"calibration": dict(self.measured.about)} if self.measured else {}
        return {"share": "aligned heads", "groups": self.groups, **about}

    @property
    def words(self) -> str:
        return super().words.replace("heads", "aligned heads")


def aligned(products_PTTDD: Tensor) -> Tensor:
    """The bases A [P * T, D, D] of P groups of T heads: orthogonal, and near the least sum of squared distances to the mean.

    products: x_a^T x_b of every two heads of a group over all tokens, fp32 or better.
    """
    groups, each, _, d, _ = products_PTTDD.shape
    products = products_PTTDD.double()
    a_PTDD = torch.eye(d, dtype=torch.float64).repeat(groups, each, 1, 1)
    for _ in range(ROUNDS):
        for head in range(1, each):  # each in turn against the sum of the others; the first stays where it is
            others = torch.einsum("ptde,ptef->pdf", products[:, head], a_PTDD) - products[:, head, head] @ a_PTDD[:, head]
            u, _, vh = torch.linalg.svd(others)
            a_PTDD[:, head] = u @ vh
    return a_PTDD.flatten(0, 1).float()
