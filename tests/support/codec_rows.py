"""Every codec of conf/codec and more settings of each class, and the plainest store of tokens: fit once, encode, keep the tail.

It knows no cache: what a codec must do is tried here against its protocol alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.stages.codec.base import Codec
from harness.stages.codec.constant_scale import ConstantScale
from harness.stages.codec.fp8 import Float8
from harness.stages.codec.hadamard import Hadamard
from harness.stages.codec.int8_static import Int8Static
from harness.stages.codec.int_groups import IntGroups
from harness.stages.codec.kivi import Kivi
from harness.stages.codec.mx_float import MxFloat
from harness.stages.codec.nv_float import NvFloat4
from harness.stages.encoded import Encoded, Heads
from harness.stages.limits import Limits
from tests.support import conf_tree

D = 64
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def variants() -> dict[str, Codec]:
    """Members of conf/codec for keys and for values, then integer groups of every width and axis, and constant scales."""
    found = {
        f"{n}-{r}": conf_tree.member("codec", n).for_role(r) for n in conf_tree.members("codec") for r in ("keys", "values")
    }
    for bits in (1, 2, 3, 4, 8):
        for axis, group, residual, symmetric in (
            ("channel", 32, 0, True),
            ("channel", 16, 5, False),
            ("token", 16, 0, True),
            ("token", 8, 32, False),
            ("token", None, 0, False),
            ("head", 8, 3, False),
            ("tensor", 16, 0, bits % 2 == 0),
        ):
            name = f"int{bits}-{axis}-{group}-{residual}" + "-symmetric" * symmetric
            found[name] = IntGroups(name=name, bits=bits, axis=axis, group=group, residual=residual, symmetric=symmetric)
    for axis in ("channel", "head", "tensor"):
        found[f"int8-frozen-{axis}"] = Int8Static(scale="frozen", axis=axis, first=16)
        found[f"e4m3-frozen-{axis}"] = Float8(scale="frozen", axis=axis, first=8)
    for axis, scale in (("head", "frozen"), ("tensor", "unit")):
        found[f"nvfp4-{scale}-{axis}"] = NvFloat4(scale=scale, axis=axis, first=16)
    found["mxfp4-16"] = MxFloat(group=16)
    found["kivi3-keys"] = Kivi(bits=3, group=16, residual=48).for_role("keys")
    found["hadamard-frozen"] = Hadamard(inner=Int8Static(scale="frozen", axis="head"))
    found["hadamard-int2-channel"] = Hadamard(inner=IntGroups(bits=2, axis="channel", residual=0))
    return found


CODECS = variants()
LOSSY = [name for name, codec in CODECS.items() if codec.lossy]


def joins_heads(codec: Codec) -> bool:
    """Whether the heads of a layer share numbers."""
    return codec.joint or (isinstance(codec, IntGroups | ConstantScale) and codec.axis == "tensor")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads_of(h: int, layers: int = 1) -> Heads:
    return Heads(tuple(range(layers)), 0, h // layers)


def fitted(codec: Codec, x_HND: Tensor, layers: int = 1) -> Codec:
    """The codec as a store would use it for these tokens; a calibrated one gets limits that hold them."""
    heads = heads_of(x_HND.shape[0], layers)
    if codec.calibration is not None and codec.fitting is None and codec.span is None:
        limit = x_HND.float().abs().amax(1).view(layers, heads.each, -1)
        codec = codec.calibrated(Limits(dict(enumerate(limit))))
    return codec.fit(x_HND, heads)


def encoded(codec: Codec, x_HND: Tensor, layers: int = 1) -> Encoded:
    return fitted(codec, x_HND, layers).encode(x_HND)


def decode(codec: Codec, e: Encoded, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full(like.shape, torch.nan, dtype=dtype or like.dtype)
    codec.decode(e, out)
    return out


def roundtrip(codec: Codec, x_HND: Tensor, dtype: torch.dtype | None = None, layers: int = 1) -> Tensor:
    return decode(codec, encoded(codec, x_HND, layers), x_HND, dtype)


@dataclass
class Stored:
    """Keys or values of some heads: tokens leave the exact tail when the codec says so."""

    codec: Codec
    layers: int = 1
    chunks: list[Encoded] = field(default_factory=list)
    tail_HND: Tensor | None = None

    def append(self, x_HND: Tensor) -> None:
        rows = x_HND if self.tail_HND is None else torch.cat((self.tail_HND, x_HND), 1)
        ready = self.codec.leaving(rows.shape[1], self.n_encoded)
        if ready:
            first = rows[:, :ready].contiguous()
            if not self.chunks:
                self.codec = self.codec.fit(first, heads_of(rows.shape[0], self.layers))
            self.chunks.append(self.codec.encode(first))
        self.tail_HND = rows[:, ready:].clone()

    @property
    def whole(self) -> Encoded:
        joined = self.chunks[0]
        for chunk in self.chunks[1:]:
            joined = joined.cat(chunk)
        return joined

    @property
    def n_encoded(self) -> int:
        return sum(chunk.n for chunk in self.chunks)


def stored(codec: Codec, x_HND: Tensor, calls: list[int]) -> Stored:
    """Tokens brought in calls of these sizes."""
    if codec.needs:
        codec = codec.observing(normal(x_HND.shape[0], 2, 40, x_HND.shape[2], seed=9), x_HND)
    rows, at = Stored(codec), 0
    for n in calls:
        rows.append(x_HND[:, at : at + n].clone())
        at += n
    assert at == x_HND.shape[1]
    return rows


def chunks(n: int, size: int) -> list[int]:
    return [min(size, n - at) for at in range(0, n, size)]


def storage(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
