"""Asymmetric integer groups, codes really packed; it knows nothing of eviction or of where rows come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.stages.codec.packing import pack, packed_width, unpack_into
from harness.stages.encoded import Encoded
from harness.stages.protocols import Codec
from harness.stages.rounding import keep_finite, round_down, round_up
from harness.types import require


@dataclass(frozen=True, kw_only=True)
class IntGroups(Codec):
    """x' = q * s + m per group, q = clamp(round((x - m) / s), 0, 2^bits - 1).

    m is the group's minimum rounded down and s = (max - m) / (2^bits - 1) rounded up, both in the cache dtype; codes are
    computed against the stored m and s, so the extremes stay inside the code range.
    axis "channel" groups `group` consecutive tokens of one channel (right for keys, whose outliers live in channels: KIVI,
    arXiv 2402.02750); axis "token" groups `group` consecutive channels of one token. "auto": channel for keys, token for
    values.
    Bytes per KV head: n * ceil(d * bits / 8) plus two metadata values per group.
    """

    name: str = "int4"
    bits: int = 4
    group: int = 32
    axis: str = "auto"
    residual: int = 32

    def __post_init__(self) -> None:
        require(self.bits in (2, 4, 8), "codec.bits", self.bits, "allowed are 2, 4 and 8")
        require(isinstance(self.group, int) and self.group > 1, "codec.group", self.group, "an integer of at least 2")
        require(self.axis in ("auto", "channel", "token"), "codec.axis", self.axis, "allowed are auto, channel, token")
        ok = isinstance(self.residual, int) and self.residual >= 0
        require(ok, "codec.residual", self.residual, "a number of tokens, 0 or more")

    def for_role(self, role: str) -> IntGroups:
        """Resolve axis "auto" for "keys" or "values"."""
        return replace(self, axis="channel" if role == "keys" else "token") if self.axis == "auto" else self

    @property
    def block(self) -> int:
        return self.group if self.axis == "channel" else 1

    def info(self) -> dict[str, object]:
        return {
            "codec": self.name,
            "bits": self.bits,
            "axis": self.axis,
            "group": self.group,
            "residual": self.residual,
            "scale": "dynamic",
            "clipped": 0.0,
        }

    def check(self, head_dim: int) -> None:
        """With axis "token" the group must divide head_dim."""
        divisors = [g for g in range(2, head_dim + 1) if head_dim % g == 0]
        ok = self.axis != "token" or head_dim % self.group == 0
        require(ok, "codec.group", self.group, f"it must divide head_dim {head_dim}: allowed are {divisors}")

    def encode(self, x_HND: Tensor) -> Encoded:
        top = (1 << self.bits) - 1
        dim = 2 if self.axis == "channel" else 3
        x_groups = _groups(x_HND.float(), dim, self.group)
        low = round_down(x_groups.amin(dim, keepdim=True), x_HND.dtype)
        scale = round_up((x_groups.amax(dim, keepdim=True) - low.float()) / top, x_HND.dtype)
        divisor = scale.float().masked_fill(scale == 0, 1.0)  # a constant group has scale 0 and decodes to its minimum
        codes = ((x_groups - low.float()) / divisor).round().clamp(0, top).to(torch.uint8)
        codes_HND = codes.flatten(dim - 1, dim)
        metadata = {"min": low.squeeze(dim), "scale": scale.squeeze(dim)}
        return Encoded({"codes": pack(codes_HND, self.bits)}, metadata, int(x_HND.shape[1]))

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        unpack_into(e.payload["codes"], self.bits, out_HND)
        dim = 2 if self.axis == "channel" else 3
        groups = _groups(out_HND, dim, self.group)
        torch.addcmul(e.metadata["min"].unsqueeze(dim), groups, e.metadata["scale"].unsqueeze(dim), out=groups)
        keep_finite(out_HND)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return h * n * packed_width(d, self.bits), h * (n * d // self.group) * 2 * itemsize


def _groups(x_HND: Tensor, dim: int, group: int) -> Tensor:
    """View the token axis (dim 2) or the channel axis (dim 3) as groups along that dim."""
    h, n, d = x_HND.shape
    return x_HND.view(h, n // group, group, d) if dim == 2 else x_HND.view(h, n, d // group, group)
