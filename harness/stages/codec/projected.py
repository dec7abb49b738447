"""Coefficients in a basis of fewer vectors than there are channels: what low-rank codecs of keys or values have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec.over_inner import OverInner
from harness.stages.codec.packing import set_blocks
from harness.stages.codec.tiled import tiled_product
from harness.stages.encoded import Encoded, Heads
from harness.stages.rank import Rank
from harness.stages.rounding import clamp_to_range, in_range

BASIS = "basis"


@dataclass(frozen=True, kw_only=True)
class Projected(OverInner):
    """y = x B is encoded by `inner`, x' = y' B^T: x holds s heads of a token side by side, B [s * D, s * q] is orthonormal.

    y is cut into s slices of q numbers, by falling energy, so that every head stores q numbers of a token, as heads of dim q
    would. Products are made in tiles of one size: their bits do not depend on how many tokens come together, or on which heads
    are decoded. y and B are rounded to the cache dtype.
    rank: how many numbers, q. inner: how coefficients are stored. sinks, recent: first and newest tokens that stay exact.
    Bytes of a head: those of `inner` for head dim q, and its rows of B once, D * s * q * itemsize, as metadata.
    """

    name: str
    rank: Rank
    inner: Codec = field(default_factory=Exact)
    sinks: int = 0
    recent: int = 0
    basis_HDR: Tensor | None = field(default=None, repr=False, compare=False)  # set by `fit`

    def __post_init__(self) -> None:
        for key in ("sinks", "recent"):
            value = getattr(self, key)
            require(isinstance(value, int) and value >= 0, f"codec.{key}", value, "a number of exact tokens, 0 or more")
        self.require_plain(beside=not self.inner.needs and not isinstance(self.inner, Projected))

    @abstractmethod
    def together(self, h: int) -> int:
        """How many heads share coefficients, s, where a layer has h heads."""

    @abstractmethod
    def vectors(self, x_HND: Tensor, heads: Heads, q: int) -> Tensor:
        """The rows of the bases for these heads, [H, D, s * q]."""

    @property
    def aligned(self) -> bool:
        return self.joint

    @property
    def by_tokens(self) -> bool:
        return self.inner.by_tokens

    @property
    def residual(self) -> int:
        return self.recent

    def for_role(self, role: str) -> Codec:
        return replace(self, inner=self.inner.for_role(role))

    def check(self, head_dim: int) -> None:
        """The rank must fit the head dim, and the inner codec must agree."""
        if self.rank.known:
            self.inner.check(self.numbers(head_dim, 2))

    def check_heads(self, heads: int, layers: int) -> None:
        """KV heads, or layers, must fall into whole sets."""
        s = self.together(heads)
        if heads * layers % s:
            raise UserError(f"codec {self.name}: {heads} KV heads of {layers} layers do not fall into sets of {s}")

    def numbers(self, d: int, itemsize: int) -> int:
        """Numbers q that a head of dim d stores of a token."""
        return self.rank.numbers(
            d, self.fits, lambda q: Fraction(sum(self.inner.nbytes(1, self.flush, q, itemsize)), self.flush)
        )

    def fits(self, q: int) -> bool:
        """Whether the inner codec can store q numbers of a token."""
        try:
            self.inner.check(q)
        except UserError:
            return False
        return True

    def info(self) -> dict[str, object]:
        inner = self.inner.info() if self.inner.lossy else {"scale": "unit"}
        exact = {key: value for key, value in (("sinks", self.sinks), ("residual", self.recent)) if value}
        found = {} if self.basis_HDR is None else {"vectors": int(self.basis_HDR.shape[2])}
        rank = f"{self.rank.value:g} {self.rank.unit}"
        return {**inner, "codec": self.name, "inner": self.inner.name, "rank": rank, **exact, **found}

    def fit(self, x_HND: Tensor, heads: Heads) -> Codec:
        """The rows of the bases for these heads, in the cache dtype, and the inner codec's constants."""
        q = self.numbers(int(x_HND.shape[2]), x_HND.element_size())
        basis = self.vectors(x_HND, heads, q).to(x_HND.dtype).contiguous().to(x_HND.device)
        found = replace(self, basis_HDR=basis)
        return replace(found, inner=self.inner.fit(_coefficients(x_HND, basis, q)[0], heads))

    def of_heads(self, heads: Tensor) -> Codec:
        """Some heads, where each has a basis of its own."""
        assert self.basis_HDR is not None
        return replace(self, basis_HDR=self.basis_HDR.index_select(0, heads), inner=self.inner.of_heads(heads))

    def encode(self, x_HND: Tensor) -> Encoded:
        basis = self.basis_HDR
        assert basis is not None, "fit comes before encode"
        q = self.numbers(int(x_HND.shape[2]), x_HND.element_size())
        y, clipped = _coefficients(x_HND, basis, q)
        e = self.inner.encode(y)
        together = basis.shape[2] // q
        return replace(e, shared={**e.shared, BASIS: basis}, clipped=e.clipped + clipped, together=together)

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        basis, s = e.shared[BASIS], e.together
        q, inner = basis.shape[2] // s, {name: tensor for name, tensor in e.shared.items() if name != BASIS}
        y = torch.empty(len(basis), e.n, q, dtype=out_HND.dtype, device=out_HND.device)
        self.inner.decode(replace(e, shared=inner, together=1, skip=0), y)
        for first in range(0, len(basis), s):
            side_NR = y[first : first + s].transpose(0, 1).reshape(e.n, -1)
            for head in range(max(first, e.skip), min(first + s, e.skip + len(out_HND))):
                x = tiled_product(side_NR, basis[head].to(out_HND.dtype).T)
                clamp_to_range(x)
                out_HND[head - e.skip] = x

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        """Of one layer's h heads."""
        q = self.numbers(d, itemsize)
        payload, metadata = self.inner.nbytes(h, n, q, itemsize)
        return payload, metadata + (h * d * self.together(h) * q * itemsize if n else 0)


def _coefficients(x_HND: Tensor, basis_HDR: Tensor, q: int) -> tuple[Tensor, Tensor | int]:
    """(coefficients [H, N, q] in x's dtype, number of elements clamped to the range of float16)."""
    (h, n, d), rank = x_HND.shape, basis_HDR.shape[2]
    s = rank // q
    y_HNQ, clipped = x_HND.new_empty(h, n, q), list[Tensor | int]()
    for some in set_blocks(x_HND, s):
        sides = x_HND[some].float().view(-1, s, n, d).transpose(1, 2).reshape(-1, n, s * d)
        bases = basis_HDR[some].float().reshape(-1, s * d, rank)
        found = torch.stack([tiled_product(x, basis) for x, basis in zip(sides, bases, strict=True)])
        y, beyond = in_range(found, x_HND.dtype)
        y_HNQ[some] = y.view(-1, n, s, q).transpose(1, 2).reshape(-1, n, q)
        clipped.append(beyond)
    return y_HNQ, sum(clipped)
