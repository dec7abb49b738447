"""NVFP4: 4-bit floats under an 8-bit float for every 16 channels of a token, and one constant for a whole layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.codec.constant_scale import ConstantScale
from harness.stages.codec.mx_float import check_group, write_scaled
from harness.stages.codec.packing import head_blocks, packed_width
from harness.stages.codec.small_floats import TOP, coded, from_e4m3, to_e4m3
from harness.stages.encoded import Encoded

BITS, AXES = 4, ("tensor", "head")


@dataclass(frozen=True, kw_only=True)
class NvFloat4(ConstantScale):
    """x' = g s f: f = e2m1 of x / (g s), s = e4m3 of max|x| / (6 g) over `group` channels of one token, g constant, fp32.

    Format: arXiv 2509.25149, with g = limit / (6 * 448), so that the group that reaches the limit has the largest s (kvpress:
    none). Both roundings are to nearest and saturate. An element is off by at most 1/5 of itself, or g s / 4. What saturates by
    more than rounding is counted as clipped: elements beyond the limit, and the largest of groups that lie so far below it
    (limit / 28672) that s has fewer than its four bits.

    scale, where the limit comes from: "frozen", the first tokens; "calibrated", a text, as checkpoints for TensorRT-LLM bring
    it; "unit", g = 1, which needs neither.
    axis: "tensor", one g for the keys and one for the values of a layer; "head", one for each KV head.
    group: 16 in the format.
    Bytes of a token per KV head: packed_width(d, 4) + d / group, 4.5 bits an element; 4 for g, once.
    """

    name: str = "nvfp4"
    scale: str = "frozen"
    axis: str = "tensor"
    group: int = 16

    def __post_init__(self) -> None:
        require(self.axis in AXES, "codec.axis", self.axis, f"allowed are {', '.join(AXES)}")
        require(isinstance(self.group, int) and self.group > 1, "codec.group", self.group, "an integer of at least 2")
        super().__post_init__()

    @property
    def top(self) -> float:
        return TOP[4] * TOP[8]

    def info(self) -> dict[str, object]:
        return {**super().info(), "bits": BITS, "group": self.group}

    def check(self, head_dim: int) -> None:
        """The group must divide head_dim."""
        check_group(self.group, head_dim)

    def encode(self, x_HND: Tensor) -> Encoded:
        shared = self.shared()
        cut = ((some, {name: one[some] for name, one in shared.items()}) for some in head_blocks(x_HND))
        return replace(Encoded.stack([self._encoded(x_HND[some], own) for some, own in cut]), shared=shared)

    def _encoded(self, x_HND: Tensor, shared: Mapping[str, Tensor]) -> Encoded:
        x = x_HND.float()
        groups_HNGE = x.view(*x.shape[:2], -1, self.group)
        largest = groups_HNGE.abs().amax(-1)
        if shared:
            largest = largest / shared["scale"][:, None]
        scale_HNG = to_e4m3(largest / TOP[4])
        divisor = _steps(scale_HNG, shared)
        divisor = divisor.masked_fill(divisor == 0, math.inf)  # a group of zeros, or far below the others: all codes are 0
        codes, clipped = coded((groups_HNGE / divisor[..., None]).flatten(2), BITS)
        return Encoded({"codes": codes}, {"scale": scale_HNG}, int(x_HND.shape[1]), clipped=clipped)

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        write_scaled(e.payload["codes"], _steps(e.metadata["scale"], e.shared), BITS, out_HND)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return h * n * packed_width(d, BITS), h * n * (d // self.group) + self.shared_bytes(h, n, d)


def _steps(scale_HNG: Tensor, shared: Mapping[str, Tensor]) -> Tensor:
    """The scales g s in fp32, from the codes of s."""
    s = from_e4m3(scale_HNG, torch.float32)
    return s * shared["scale"][:, None] if shared else s
