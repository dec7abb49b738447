"""KVQuant: codebooks fitted to the text, keys per channel, values per token, and the largest numbers exact."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.stages.codec.base import Codec
from harness.stages.codec.codebook import looked_up, nearest
from harness.stages.codec.packing import pack, packed_width, set_blocks
from harness.stages.encoded import Encoded, Heads
from harness.stages.limits import Calibration, Codebooks, Limits
from harness.stages.rounding import clamp_to_range, round_down, round_up

BITS = (1, 2, 3, 4)
AXES = ("auto", "channel", "token")
WEIGHTS = ("plain", "fisher")
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class KVQuant(Codec):
    """KVQuant (arXiv 2401.18079; kvpress: none): x' = m + s c, c the nearest of 2^bits numbers of the layer's own codebook.

    A token's vector is that of all KV heads of a layer. Its k = max(1, round(outliers * length)) largest numbers are kept
    exactly, value and index. The paper takes those beyond a threshold, whose number varies: for keys that of the range below,
    for values half of the share at each end.
    axis:
        "channel" (keys): m and s are the middle and half of each channel's range on calibration text, which leaves out 100 -
            `calibration.percentile` percent of its numbers; the largest are those of largest |x - m| / s. Numbers beyond the
            range that are not among them get the nearest end of the codebook, and are counted as clipped;
        "token" (values): m and s are the middle and half of what is left of the vector once the numbers farthest from its mean
            are taken out, rounded outwards in the cache dtype;
        "auto": channel for keys, token for values.
    weights: of the numbers of a calibration text in the k-means that fits a codebook:
        "plain": all the same;
        "fisher" (the paper): F_i = (dL / dx_i)^2, so that points minimise sum_i F_i (x_i - x'_i)^2. Of u = (x - m) / s the
            weight is F s^2; the authors' code weights errors of u with F alone, as if all ranges were alike.
    The paper's keys are stored before RoPE: compress.rope=pre. Its separate normalisation of two bits is not built.
    sinks: first tokens that stay exact, one in the paper.
    Heads of a layer are encoded together, so tokens cannot be evicted later; evict before, with phase=prefill. Heads that keep
    different numbers of tokens each are a vector of their own.
    Bytes of a layer: n (h packed_width(d, bits) + k (itemsize + 1, or 2 beyond 256 numbers)), for values n 2 itemsize, and in
    fp32 once the codebook, 4 * 2^bits, for keys with m and s, 8 h d.
    """

    name: str = "kvquant"
    bits: int = 3
    outliers: float = 0.01
    axis: str = "auto"
    weights: str = "plain"
    sinks: int = 1
    calibration: Calibration | None = None
    table: Codebooks | None = field(default=None, repr=False, compare=False)  # set by `calibrated`
    points_LP: Tensor | None = field(default=None, repr=False, compare=False)  # these three set by `fit`
    middle_HD: Tensor | None = field(default=None, repr=False, compare=False)
    half_HD: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(self.bits in BITS, "codec.bits", self.bits, f"allowed are {', '.join(map(str, BITS))}")
        require(self.axis in AXES, "codec.axis", self.axis, f"allowed are {', '.join(AXES)}")
        require(self.weights in WEIGHTS, "codec.weights", self.weights, f"allowed are {', '.join(WEIGHTS)}")
        ok = isinstance(self.outliers, int | float) and 0 < self.outliers <= 0.1
        require(ok, "codec.outliers", self.outliers, "a share above 0 and at most 0.1")
        ok = isinstance(self.sinks, int) and self.sinks >= 0
        require(ok, "codec.sinks", self.sinks, "a number of first tokens that stay exact, 0 or more")
        require(self.calibration is not None, "codec.calibration", None, "its codebooks are fitted on a text")

    def for_role(self, role: str) -> KVQuant:
        """Resolve axis "auto" for "keys" or "values"."""
        return replace(self, axis="channel" if role == "keys" else "token") if self.axis == "auto" else self

    @property
    def joint(self) -> bool:
        return True

    @property
    def by_tokens(self) -> bool:
        return True

    @property
    def fitting(self) -> KVQuant:
        return self

    @property
    def size(self) -> int:
        """Points of a codebook."""
        return 1 << self.bits

    @property
    def share(self) -> float | None:
        """Of a channel's numbers, those outside its range; None if channels have none."""
        assert self.calibration is not None
        return 1 - self.calibration.percentile / 100 if self.axis == "channel" else None

    @property
    def settings(self) -> dict[str, object]:
        """What the codebooks depend on."""
        weighted = {} if self.weights == "plain" else {"weights": self.weights}
        return {"axis": self.axis, "outliers": self.outliers, "skip": self.skip, **weighted}

    @property
    def skip(self) -> int:
        """First tokens of a calibration window that are not measured, as they are not encoded."""
        return self.sinks

    def info(self) -> dict[str, object]:
        about = {"calibration": dict(self.table.about)} if self.table else {}
        return {
            "codec": self.name,
            "bits": self.bits,
            "axis": self.axis,
            "outliers": self.outliers,
            "weights": self.weights,
            **({"sinks": self.sinks} if self.sinks else {}),
            "scale": "calibrated" if self.axis == "channel" else "dynamic",
            "clipped": 0.0,
            **about,
        }

    def calibrated(self, limits: Limits) -> KVQuant:
        """With measured ranges and codebooks."""
        assert isinstance(limits, Codebooks)
        return replace(self, table=limits)

    def fit(self, x_HND: Tensor, heads: Heads) -> KVQuant:
        """Take the constants of these heads' layers out of the table."""
        if self.table is None:
            raise UserError(f"codec {self.name} has no calibration table")
        device = x_HND.device
        fitted = replace(self, points_LP=self.table.points_of(heads).to(device))
        if self.axis != "channel":
            return fitted
        middle, half = _centred(*self.table.range(heads, int(x_HND.shape[2])))
        return replace(fitted, middle_HD=middle.to(device), half_HD=half.to(device))

    def units(
        self, x_HND: Tensor, low_HD: Tensor | None = None, high_HD: Tensor | None = None, fisher_HND: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The numbers of one layer that its codebook is for, brought to -1 .. 1, flat: all but the largest; their weights."""
        x = x_HND.float()
        if low_HD is not None and high_HD is not None:
            middle, half = _centred(low_HD, high_HD)
            u, out = self._static(x, middle, half, 1)
            half = self._vectors(half[:, None].expand_as(x), 1)
        else:
            u, out, _, half = self._dynamic(x, torch.float32, 1)
        kept = torch.ones_like(u, dtype=torch.bool).scatter_(-1, out, False)
        weights = None if fisher_HND is None else (self._vectors(fisher_HND, 1) * half.square())[kept]
        return u[kept].clamp(-1, 1), weights

    def outliers_of(self, length: int) -> int:
        """How many numbers of a vector are exact."""
        return min(length, max(1, round(self.outliers * length)))

    def _vectors(self, x_HND: Tensor, layers: int) -> Tensor:
        """[layers, N, h * D]: the heads of a layer side by side."""
        h, n, d = x_HND.shape
        return x_HND.reshape(layers, h // layers, n, d).transpose(1, 2).reshape(layers, n, -1)

    def _static(self, x_HND: Tensor, middle_HD: Tensor, half_HD: Tensor, layers: int) -> tuple[Tensor, Tensor]:
        """(numbers in units of their channel's range [L, N, h * D], where the largest are [L, N, k])."""
        u = self._vectors((x_HND - middle_HD[:, None]) / half_HD[:, None], layers)
        return u, self._largest(u.abs())

    def _dynamic(self, x_HND: Tensor, dtype: torch.dtype, layers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(numbers in units of their token's range, where the largest are, the range's lower end and half [L, N, 1])."""
        x = self._vectors(x_HND, layers)
        size = x.shape[-1]
        out = self._largest((x - (x / size).sum(-1, keepdim=True)).abs())
        low = round_down(x.scatter(-1, out, torch.inf).amin(-1, keepdim=True), dtype)
        high = x.scatter(-1, out, -torch.inf).amax(-1, keepdim=True)
        half = round_up(high / 2 - low.float() / 2, dtype)
        unit = half.float()
        u = (x - low.float()) / unit.masked_fill(unit == 0, 1) - 1
        return u, out, low, half

    def _largest(self, far: Tensor) -> Tensor:
        """Indices of the k largest numbers of each vector, ascending."""
        k = self.outliers_of(far.shape[-1])
        return far.topk(k, dim=-1, sorted=False).indices.sort(-1).values

    def encode(self, x_HND: Tensor) -> Encoded:
        assert self.points_LP is not None, "fit comes before encode"
        each, shared = len(x_HND) // len(self.points_LP), {"points": self.points_LP}
        if self.middle_HD is not None and self.half_HD is not None:
            shared |= {"middle": self.middle_HD, "half": self.half_HD}
        parts = [self._encoded(x_HND[some], slice(some.start // each, some.stop // each)) for some in set_blocks(x_HND, each)]
        return replace(Encoded.stack(parts), shared=shared)

    def _encoded(self, x_HND: Tensor, layers: slice) -> Encoded:
        """The heads of these layers, without constants."""
        assert self.points_LP is not None
        (h, n, d), some_LP, metadata = x_HND.shape, self.points_LP[layers], dict[str, Tensor]()
        count, clipped = len(some_LP), cast("Tensor | int", 0)
        if self.middle_HD is not None and self.half_HD is not None:
            heads = slice(layers.start * h // count, layers.stop * h // count)
            u, out = self._static(x_HND.float(), self.middle_HD[heads], self.half_HD[heads], count)
            clipped = (u.abs() > 1).sum() - (u.gather(-1, out).abs() > 1).sum()
        else:
            u, out, low, half = self._dynamic(x_HND.float(), x_HND.dtype, count)
            metadata = {"low": low, "half": half}
        exact = self._vectors(x_HND, count).gather(-1, out)
        codes = torch.stack([nearest(one, points) for one, points in zip(u, some_LP, strict=True)])
        codes = codes.view(count, n, h // count, d).transpose(1, 2).reshape(h, n, d)
        payload = {"codes": pack(codes, self.bits), "outliers": exact, "index": out.to(_index_dtype(u.shape[-1]))}
        return Encoded(payload, metadata, n, clipped=clipped)

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        points_LP, d = e.shared["points"], int(out_HND.shape[2])
        each = len(out_HND) // len(points_LP)
        for layer, points in enumerate(points_LP):
            heads = slice(layer * each, (layer + 1) * each)
            x = looked_up(e.payload["codes"][heads], self.bits, points, d)
            if "middle" in e.shared:
                x.mul_(e.shared["half"][heads, None]).add_(e.shared["middle"][heads, None])
            else:
                x.add_(1).mul_(e.metadata["half"][layer].float()).add_(e.metadata["low"][layer].float())
            clamp_to_range(x, out_HND.dtype)
            index = e.payload["index"][layer].long()
            token = torch.arange(e.n, device=x.device)[:, None]
            x[index // d, token, index % d] = e.payload["outliers"][layer].float()
            out_HND[heads] = x

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        """Of one layer's h heads."""
        wide = _index_dtype(h * d).itemsize
        payload = h * n * packed_width(d, self.bits) + n * self.outliers_of(h * d) * (itemsize + wide)
        ranges, once = (0, 8 * h * d) if self.axis == "channel" else (2 * n * itemsize, 0)
        return payload, ranges + (once + 4 * self.size if n else 0)


def _index_dtype(length: int) -> torch.dtype:
    return torch.uint8 if length <= 256 else torch.int16 if length <= 1 << 15 else torch.int32


def _centred(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """(middle, half) of a range."""
    return (low + high) / 2, ((high - low) / 2).clamp(min=TINY)
