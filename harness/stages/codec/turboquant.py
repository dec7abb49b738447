"""TurboQuant: a random rotation makes every vector alike, so that one codebook, known beforehand, is near the best for all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.fields import read_as
from harness.stages.codec.base import Codec
from harness.stages.codec.codebook import best_points, looked_up, nearest
from harness.stages.codec.hadamard import matrix as hadamard
from harness.stages.codec.packing import head_blocks, pack, packed_width, unpack
from harness.stages.codec.tiled import tiled_product
from harness.stages.encoded import Encoded
from harness.stages.rounding import clamp_to_range

BITS = (1, 2, 3, 4)
VARIANTS = ("mse", "prod", "auto")
ROTATIONS = ("qr", "hadamard")
SMALLEST = 4  # head dim: with fewer channels a coordinate's density has no single peak
GRID = 1 << 19  # points of the density that the codebook is computed for
REACH = 10  # standard deviations of a coordinate that they span


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Codec):
    """TurboQuant (arXiv 2504.19874; kvpress: none): x' = |x| P^T c, c the nearest codebook entries of P x / |x|.

    P is a random orthogonal matrix. Each coordinate of P x / |x| then has the density (1 - t^2)^((d - 3) / 2) on [-1, 1], for
    which the best codebook of 2^bits numbers is computed (Lloyd-Max); no data is looked at.

    variant:
        "mse": as above; E|x - x'|^2 is |x|^2 times about 0.36, 0.117, 0.034, 0.009 for 1, 2, 3, 4 bits;
        "prod": bits - 1 of them, and a bit for the sign of each coordinate of S r, r what is left and S Gaussian (QJL): x' adds
            sqrt(pi / 2) / d |r| S^T sign(S r), so that products with any q have the right mean;
        "auto": prod for keys, mse for values.
    rotation, what P is: "qr", the orthogonal factor of a Gaussian matrix, as in the paper; "hadamard", random signs, then a
        Hadamard matrix (head dims that are powers of two). S acts behind P, which changes no distribution.
    P, S and the codebook follow from head dim and `seed`; like a weight they are held once for all layers, heads and sequences,
    and are no part of a cache. `codec_info` gives their size as constants_bytes.
    Stored beside the codes: |x| / sqrt(d), and for prod |r| |x| / sqrt(d), in the cache dtype, in which no |x| overflows.
    The paper's mixtures of two widths (2.5 and 3.5 bits) are not built.
    Bytes of a token per KV head: packed_width(d, bits) + itemsize; prod: packed_width(d, bits - 1) + packed_width(d, 1) + 2
    itemsize (with one bit: one itemsize).
    """

    name: str = read_as(lambda codec, given: given or _named(codec.variant, codec.rotation), "")
    bits: int = 4
    variant: str = "mse"
    rotation: str = "qr"
    seed: int = 0
    residual: int = 0
    sinks: int = 0
    dim: int = 0  # head dim, for `info`; set by fit

    def __post_init__(self) -> None:
        require(self.bits in BITS, "codec.bits", self.bits, f"allowed are {', '.join(map(str, BITS))}")
        require(self.variant in VARIANTS, "codec.variant", self.variant, f"allowed are {', '.join(VARIANTS)}")
        require(self.rotation in ROTATIONS, "codec.rotation", self.rotation, f"allowed are {', '.join(ROTATIONS)}")
        for key in ("seed", "residual", "sinks", "dim"):
            value = getattr(self, key)
            require(isinstance(value, int) and value >= 0, f"codec.{key}", value, "an integer, 0 or more")

    @property
    def by_tokens(self) -> bool:
        return True

    def for_role(self, role: str) -> TurboQuant:
        """Resolve variant "auto" for "keys" or "values"."""
        return replace(self, variant="prod" if role == "keys" else "mse") if self.variant == "auto" else self

    def check(self, head_dim: int) -> None:
        """Refuse head dims that are too small, or that the rotation does not have."""
        if head_dim < SMALLEST:
            raise UserError(f"codec {self.name} is not possible with head_dim {head_dim}: it must be at least {SMALLEST}")
        if self.rotation == "hadamard" and head_dim & (head_dim - 1):
            raise UserError(
                f"codec.rotation='hadamard' is not possible with head_dim {head_dim}: it must be a power of two; legal is qr"
            )

    def info(self) -> dict[str, object]:
        return {
            "codec": self.name,
            "bits": self.bits,
            "axis": "token",
            "variant": self.variant,
            "rotation": self.rotation,
            **({"seed": self.seed} if self.seed else {}),
            **({"residual": self.residual} if self.residual else {}),
            **({"sinks": self.sinks} if self.sinks else {}),
            **({"constants_bytes": self._constants_bytes(self.dim)} if self.dim else {}),
            "scale": "dynamic",
            "clipped": 0.0,
        }

    def fit(self, x_HND: Tensor, heads: object) -> TurboQuant:
        """Only notes the head dim."""
        return replace(self, dim=int(x_HND.shape[2]))

    @property
    def _prod(self) -> bool:
        return self.variant == "prod"

    @property
    def _code_bits(self) -> int:
        """Bits of a codebook entry; 0: there is no codebook."""
        return self.bits - self._prod

    def encode(self, x_HND: Tensor) -> Encoded:
        return Encoded.stack([self._encoded(x_HND[some]) for some in head_blocks(x_HND)])

    def _encoded(self, x_HND: Tensor) -> Encoded:
        d = int(x_HND.shape[2])
        x = x_HND.float()
        peak = x.abs().amax(-1, keepdim=True)
        size = peak * (x / peak.masked_fill(peak == 0, 1)).square().mean(-1, keepdim=True).sqrt()  # |x| / sqrt(d)
        size = size.to(x_HND.dtype)
        payload = self._codes(x / (size.float() * math.sqrt(d)).masked_fill(size == 0, 1), d)
        metadata = {} if self.bits == self._prod else {"size": size}
        if self._prod:
            metadata["left"] = (payload.pop("left") * size.float()).to(x_HND.dtype)
        return Encoded(payload, metadata, int(x_HND.shape[1]))

    def _codes(self, unit_HND: Tensor, d: int) -> dict[str, Tensor]:
        """Packed codes of vectors of length 1; for prod packed signs and |r| [H, N, 1] as "left".

        Products are in tiles of a fixed number of tokens, so that no code depends on which other tokens came with it.
        """
        device, found = unit_HND.device, dict[str, Tensor]()
        y = tiled_product(unit_HND, rotation(self.rotation, d, self.seed, torch.float32, device))
        if self._code_bits:
            points = points_on(d, self._code_bits, device)
            codes = nearest(y, points)
            found["codes"] = pack(codes, self._code_bits)
            y = y - points[codes.long()] if self._prod else y
        if self._prod:
            signs = tiled_product(y, gaussian(d, self.seed, torch.float32, device).T) >= 0
            found |= {"signs": pack(signs.to(torch.uint8), 1), "left": y.norm(dim=-1, keepdim=True)}
        return found

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        d, device = int(out_HND.shape[2]), out_HND.device
        back = rotation(self.rotation, d, self.seed, torch.float32, device).T
        points = points_on(d, self._code_bits, device) * math.sqrt(d) if self._code_bits else None
        for some in head_blocks(out_HND):
            y: Tensor | float = 0.0
            if points is not None:
                y = looked_up(e.payload["codes"][some], self._code_bits, points, d) * e.metadata["size"][some].float()
            if self._prod:
                signs = unpack(e.payload["signs"][some], 1, d).float().mul_(2).sub_(1)
                turned = tiled_product(signs, gaussian(d, self.seed, torch.float32, device))
                y = turned.mul_(math.sqrt(math.pi / 2 / d) * e.metadata["left"][some].float()).add_(y)
            assert isinstance(y, Tensor)
            x = tiled_product(y, back)
            clamp_to_range(x, out_HND.dtype)
            out_HND[some] = x

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        codes = packed_width(d, self._code_bits) if self._code_bits else 0
        sizes = 2 if self._prod and self.bits > 1 else 1
        return h * n * (codes + (packed_width(d, 1) if self._prod else 0)), h * n * sizes * itemsize

    def _constants_bytes(self, d: int) -> int:
        """P, S and the codebook, fp32."""
        return 4 * (d * d * (2 if self._prod else 1) + (1 << self._code_bits if self._code_bits else 0))


def _named(variant: str, turn: str) -> str:
    return "turboquant" + ("" if turn == "qr" else f"_{turn}") + ("" if variant == "mse" else "_prod")


@lru_cache
def density_points(d: int, bits: int) -> Tensor:
    """The best codebook of 2^bits numbers for a coordinate of a random vector of length 1 in d dimensions, fp64, ascending."""
    t = ((torch.arange(GRID, dtype=torch.float64) + 0.5) * 2 / GRID - 1) * min(1.0, REACH / math.sqrt(d))
    points = best_points(t, (1 - t.square()).pow((d - 3) / 2), 1 << bits)
    return (points - points.flip(0)) / 2  # symmetric as the density is


@lru_cache
def points_on(d: int, bits: int, device: torch.device) -> Tensor:
    """The same in fp32 on a device, sent once."""
    return density_points(d, bits).float().to(device)


@lru_cache
def rotation(kind: str, d: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """P^T [D, D] of a seed, so that a row x becomes x P^T."""
    generator = torch.Generator().manual_seed(2 * seed)
    if kind == "hadamard":
        signs = torch.randint(0, 2, (d, 1), generator=generator, dtype=torch.float64) * 2 - 1
        found = signs * hadamard(d, torch.float64, torch.device("cpu"))
    else:
        q, r = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
        found = q * r.diagonal().sign()  # uniform over all rotations
    return found.to(dtype).to(device)


@lru_cache
def gaussian(d: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """S [D, D] of a seed."""
    generator = torch.Generator().manual_seed(2 * seed + 1)
    return torch.randn(d, d, generator=generator, dtype=torch.float64).to(dtype).to(device)
