"""Group-wise integer quantization in 1, 2, 3, 4 or 8 bits, with packed codes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.codec.base import Codec
from harness.stages.codec.packing import WIDTHS, head_blocks, pack, packed_width, set_blocks, unpack
from harness.stages.encoded import Encoded, Heads
from harness.stages.rounding import clamp_to_range, round_down, round_up

AXES = ("channel", "token", "head", "tensor")


@dataclass(frozen=True, kw_only=True)
class IntGroups(Codec):
    """x' = q * s + m per group of elements (kvpress: none; transformers' QuantizedCache is close).

    Asymmetric: m = min rounded down, s = (max - m) / (2^bits - 1) rounded up, q = 0 .. 2^bits - 1.
    Symmetric: s = max|x| / L rounded up with L = 2^(bits - 1) - 1; m = -L * s is not stored; q = 0 .. 2 L, so zero is exact.
    One symmetric bit means -s or +s with s = max|x| / 2, as it has no code for zero.
    Metadata is in the cache dtype and codes are computed from the rounded metadata, so nothing is clipped and an element is off
    by at most s / 2. One asymmetric bit stores s / 2, as s itself may exceed float16.

    axis, what shares m and s:
        "channel": `group` consecutive tokens of one channel (right for keys, whose outliers live in channels: KIVI, arXiv
            2402.02750);
        "token": `group` consecutive channels of one token, null for all of them;
        "head": all channels of `group` consecutive tokens of one head;
        "tensor": all channels and KV heads of one layer for `group` consecutive tokens; stored once a head, as heads may be
            separated later;
        "auto": channel for keys, token for values.
    All are dynamic: measured on the tokens they encode.
    residual: newest tokens that stay exact. sinks: first tokens that stay exact.
    flush_tokens: tokens that are encoded together, null for one group of tokens.
    Bytes per KV head: n * packed_width(d) plus two metadata values per group, one when symmetric.
    """

    name: str = "int4"
    bits: int = 4
    symmetric: bool = False
    group: int | None = 32
    axis: str = "auto"
    residual: int = 32
    sinks: int = 0
    flush_tokens: int | None = None
    layers: int = field(default=1, repr=False, compare=False)  # that the heads of a tensor belong to; set by fit

    def __post_init__(self) -> None:
        require(self.bits in WIDTHS, "codec.bits", self.bits, f"allowed are {', '.join(map(str, WIDTHS))}")
        require(self.layers > 0, "codec.layers", self.layers, "set by the run itself; leave it out")
        require(isinstance(self.symmetric, bool), "codec.symmetric", self.symmetric, "true or false")
        require(self.axis in ("auto", *AXES), "codec.axis", self.axis, f"allowed are auto, {', '.join(AXES)}")
        if self.group is None:
            require(self.axis == "token", "codec.group", None, "null (all channels of a token) needs axis=token")
        else:
            require(isinstance(self.group, int) and self.group > 1, "codec.group", self.group, "an integer of at least 2")
        ok = isinstance(self.residual, int) and self.residual >= 0
        require(ok, "codec.residual", self.residual, "a number of tokens, 0 or more")
        ok = isinstance(self.sinks, int) and self.sinks >= 0
        require(ok, "codec.sinks", self.sinks, "a number of first tokens that stay exact, 0 or more")
        if self.flush_tokens is not None:
            ok = isinstance(self.flush_tokens, int) and self.flush_tokens > 0 and self.flush_tokens % self.block == 0
            require(ok, "codec.flush_tokens", self.flush_tokens, f"a multiple of the {self.block} tokens of a group")

    def for_role(self, role: str) -> IntGroups:
        """Resolve axis "auto" for "keys" or "values"."""
        return replace(self, axis="channel" if role == "keys" else "token") if self.axis == "auto" else self

    @property
    def block(self) -> int:
        return 1 if self.axis in ("token", "auto") else self.group or 1

    @property
    def flush(self) -> int:
        return self.flush_tokens or self.block

    @property
    def by_tokens(self) -> bool:
        return True

    def info(self) -> dict[str, object]:
        return {
            "codec": self.name,
            "bits": self.bits,
            "symmetric": self.symmetric,
            "axis": self.axis,
            "group": self.group,
            "residual": self.residual,
            **({"sinks": self.sinks} if self.sinks else {}),
            "flush": self.flush,
            "scale": "dynamic",
            "clipped": 0.0,
        }

    def check(self, head_dim: int) -> None:
        """With axis "token" the group must divide head_dim."""
        divisors = [g for g in range(2, head_dim + 1) if head_dim % g == 0]
        ok = self.axis != "token" or self.group is None or head_dim % self.group == 0
        require(ok, "codec.group", self.group, f"it must divide head_dim {head_dim}: allowed are {divisors}")

    def fit(self, x_HND: Tensor, heads: Heads) -> IntGroups:
        """Only sets the number of layers, which axis "tensor" needs."""
        return replace(self, layers=len(heads.layers))

    def encode(self, x_HND: Tensor) -> Encoded:
        if self.axis != "tensor":
            return Encoded.stack([self._encoded(x_HND[some]) for some in head_blocks(x_HND)])
        each = max(1, len(x_HND) // self.layers)  # with one scale for a layer its heads are measured together
        some = [x_HND[heads] for heads in set_blocks(x_HND, each)]
        return Encoded.stack([replace(self, layers=len(x) // each)._encoded(x) for x in some])

    def _encoded(self, x_HND: Tensor) -> Encoded:
        groups = self._groups(x_HND.float())
        metadata = self._measure(groups, x_HND.dtype)
        step, low = self._affine(metadata)
        divisor = step.masked_fill(step == 0, 1.0)  # a constant group has scale 0 and decodes to its minimum
        codes = ((groups - low) / divisor).round_().clamp_(0, self._top).to(torch.uint8).reshape(x_HND.shape)
        stored = {name: t.flatten(2) for name, t in metadata.items()}  # [H, blocks of tokens, groups or channels]
        return Encoded({"codes": pack(codes, self.bits)}, stored, int(x_HND.shape[1]))

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        groups = slice(None) if self.axis == "token" else None
        where = (slice(None), slice(None), None, groups, None if groups else slice(None))
        step, low = self._affine({name: t[where] for name, t in e.metadata.items()})
        packed, d = e.payload["codes"], out_HND.shape[-1]
        for some in head_blocks(out_HND):
            out = out_HND[some]
            x = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
            x.copy_(unpack(packed[some], self.bits, d))
            self._groups(x).mul_(step[some]).add_(low[some])
            if x is not out:
                clamp_to_range(x, out.dtype)
                out.copy_(x)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        group = self.group or d
        groups = {"channel": n // group * d, "token": n * (d // group)}.get(self.axis, n // group)
        return h * n * packed_width(d, self.bits), h * groups * (1 if self.symmetric else 2) * itemsize

    @property
    def _top(self) -> int:
        """Largest code."""
        return (1 << self.bits) - (2 if self.symmetric and self.bits > 1 else 1)

    def _measure(self, groups: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Metadata of groups [H, A, B, C, E], with size 1 in the axes that a group covers."""
        dims = (4,) if self.axis == "token" else (2,) if self.axis == "channel" else (2, 4)
        low, high = groups.amin(dims, keepdim=True), groups.amax(dims, keepdim=True)
        if self.axis == "tensor":
            low, high = self._over_heads(low, "amin"), self._over_heads(high, "amax")
        if self.symmetric:
            widest = torch.maximum(high, -low)
            return {"scale": round_up(widest / (2 if self.bits == 1 else self._top // 2), dtype)}
        low = round_down(low, dtype)
        spread = (high - low.float()) / self._top
        return {"min": low, "scale": round_up(spread / 2 if self.bits == 1 else spread, dtype)}

    def _over_heads(self, x: Tensor, how: str) -> Tensor:
        """The extreme over the heads of each layer, repeated for every head."""
        by_layer = x.view(self.layers, -1, *x.shape[1:])
        extreme: Tensor = getattr(by_layer, how)(1, keepdim=True)
        return extreme.expand_as(by_layer).flatten(0, 1)

    def _affine(self, metadata: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(s, m) in fp32 from what is stored: x' = q * s + m."""
        scale = metadata["scale"].float()
        if not self.symmetric:
            return (scale * 2 if self.bits == 1 else scale), metadata["min"].float()
        return (scale * 2, -scale) if self.bits == 1 else (scale, scale * -(self._top // 2))

    def _groups(self, x_HND: Tensor) -> Tensor:
        """View as [H, blocks of tokens, tokens, groups of channels, channels]."""
        h, n, d = x_HND.shape
        tokens, channels = self.block, (self.group or d) if self.axis == "token" else d
        return x_HND.view(h, n // tokens, tokens, d // channels, channels)
