"""ThinK: the key channels that matter least to the context's last queries are removed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.fields import read_as
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec.over_inner import OverInner
from harness.stages.codec.packing import head_blocks, pack, packed_width, unpack
from harness.stages.encoded import Encoded, Heads
from harness.stages.protocols import Needs


@dataclass(frozen=True, kw_only=True)
class Think(OverInner):
    """ThinK (arXiv 2407.21018; kvpress: ThinKPress, which only zeroes): keys lose `ratio` of their channels.

    They differ by prompt and head. A channel's score is the Frobenius norm of its part of Q K^T: the mean square of the last
    `queries` queries (of all query heads of the group) times that of the keys, after RoPE. The floor((1 - ratio) d) best
    channels stay; what is left of a token is stored by `inner`. The newest `recent` tokens keep all channels; those that age
    lose the same ones as the context.
    Differs from the authors' code: it repeats keys for every query head, so that each loses channels of its own, and removes
    floor(ratio d), one fewer where ratio d is no whole number.
    Values keep theirs: as a codec for values it is its inner codec.
    Channels are chosen when the context is compressed: it needs an exact context before it (not phase=chunked, and of a stream
    task.context above 0).
    Bytes of an encoded token per KV head: those of `inner` at the channels that stay; and one bit a channel, once.
    """

    inner: Codec = field(default_factory=Exact)
    name: str = read_as(lambda codec, given: given or _named(codec.inner), "")
    ratio: float = 0.4
    queries: int = 32
    recent: int = 32
    sinks: int = 0
    channels_HP: Tensor | None = field(default=None, repr=False, compare=False)  # that stay, packed bits; set by `observing`

    def __post_init__(self) -> None:
        ok = isinstance(self.ratio, int | float) and 0 < self.ratio < 1
        require(ok, "codec.ratio", self.ratio, "a share of channels between 0 and 1")
        ok = isinstance(self.queries, int) and self.queries > 0
        require(ok, "codec.queries", self.queries, "a positive number of queries")
        for key in ("recent", "sinks"):
            value = getattr(self, key)
            require(isinstance(value, int) and value >= 0, f"codec.{key}", value, "a number of tokens, 0 or more")
        self.require_plain()

    def for_role(self, role: str) -> Codec:
        """For values the inner codec, with the same exact tokens where it has such settings."""
        return replace(self, inner=self.inner.for_role(role)) if role == "keys" else self.inner.for_role(role)

    def kept(self, d: int) -> int:
        """Channels that stay."""
        return int((1 - Fraction(str(self.ratio))) * d)

    def check(self, head_dim: int) -> None:
        """At least one channel must stay, and the inner codec must agree."""
        if not self.kept(head_dim):
            raise UserError(f"codec.ratio={self.ratio} is not possible: of {head_dim} channels none would stay")
        self.inner.check(self.kept(head_dim))

    @property
    def residual(self) -> int:
        return self.recent

    @property
    def by_tokens(self) -> bool:
        return self.inner.by_tokens

    def info(self) -> dict[str, object]:
        inner = self.inner.info() if self.inner.lossy else {"axis": "channel", "scale": "dynamic", "clipped": 0.0}
        sinks = {"sinks": self.sinks} if self.sinks else {}
        return {**inner, "codec": self.name, "pruned": self.ratio, "queries": self.queries, "residual": self.recent, **sinks}

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.queries)

    def observing(self, queries_HGWD: Tensor, keys_HND: Tensor) -> Think:
        """Choose the channels that stay."""
        squares = queries_HGWD[:, :, -self.queries :].float().square().mean((1, 2))
        return replace(self, channels_HP=self._best(squares * _squares(keys_HND)))

    def fit(self, x_HND: Tensor, heads: Heads) -> Think:
        """The inner codec's constants; where no queries were observed, as outside a run, channels are chosen by these keys."""
        channels = self._best(_squares(x_HND)) if self.channels_HP is None else self.channels_HP
        inner = self.inner.fit(_only(x_HND, _places(channels, *self._shape(x_HND))), heads)
        return replace(self, channels_HP=channels, inner=inner)

    def _best(self, scores_HD: Tensor) -> Tensor:
        """The channels of the highest scores, of equal ones the first, as packed bits."""
        best = scores_HD.sort(dim=-1, descending=True, stable=True).indices[:, : self.kept(scores_HD.shape[1])]
        bits = torch.zeros(scores_HD.shape, dtype=torch.uint8, device=best.device).scatter_(1, best, 1)
        return pack(bits[:, None], 1)[:, 0]

    def _shape(self, x_HND: Tensor) -> tuple[int, int]:
        """Channels of a head, and how many of them stay."""
        return int(x_HND.shape[2]), self.kept(int(x_HND.shape[2]))

    def of_heads(self, heads: Tensor) -> Think:
        assert self.channels_HP is not None
        return replace(self, channels_HP=self.channels_HP.index_select(0, heads), inner=self.inner.of_heads(heads))

    def encode(self, x_HND: Tensor) -> Encoded:
        assert self.channels_HP is not None, "fit comes before encode"
        e = self.inner.encode(_only(x_HND, _places(self.channels_HP, *self._shape(x_HND))))
        return replace(e, shared={**e.shared, "channels": self.channels_HP})

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        places = _places(e.shared["channels"], *self._shape(out_HND))
        left = torch.empty(*out_HND.shape[:2], places.shape[1], dtype=out_HND.dtype, device=out_HND.device)
        self.inner.decode(replace(e, shared={k: t for k, t in e.shared.items() if k != "channels"}), left)
        out_HND.zero_()
        for out, some, where in zip(out_HND, left, places, strict=True):
            out.index_copy_(1, where, some)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        payload, metadata = self.inner.nbytes(h, n, self.kept(d), itemsize)
        return payload, metadata + (h * packed_width(d, 1) if n else 0)


def _squares(keys_HND: Tensor) -> Tensor:
    """Mean square of each channel [H, D], in units of the head's largest: squares of large numbers stay finite."""
    found = []
    for some in head_blocks(keys_HND):
        x = keys_HND[some].float()
        found.append((x / x.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)).square().mean(1))
    return torch.cat(found)


def _named(inner: Codec) -> str:
    return "think" if isinstance(inner, Exact) else f"think_{inner.name}"


def _places(channels_HP: Tensor, d: int, kept: int) -> Tensor:
    """Channels that stay [H, D'], ascending; every head keeps as many, so that nothing need be read to know."""
    bits = unpack(channels_HP[:, None], 1, d)[:, 0]
    return bits.sort(dim=1, descending=True, stable=True).indices[:, :kept]


def _only(x_HND: Tensor, places_HC: Tensor) -> Tensor:
    return torch.stack([x.index_select(1, where) for x, where in zip(x_HND, places_HC, strict=True)])
