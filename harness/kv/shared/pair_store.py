"""Token stores of pairs of layers with merged directions (MiniCache)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from harness.kv.token_store import ALL, TokenStore
from harness.stages.codec.base import Codec
from harness.stages.encoded import Heads, TokenIndex
from harness.stages.share.minicache import merged, most_apart, whole_tokens
from harness.stages.share.sharing import Share

NOTHING = torch.empty(0)


@dataclass(frozen=True)
class PairStore(TokenStore):
    """Keys or values [2 * H, N, D] of P lower layers and their P upper ones, read and appended as those of any 2 * P layers.

    The store itself holds their merged directions [H, N, D], by any codec. Beside it, in the cache dtype: norms_HN, the
    magnitudes [2 * H, N]; whole_HKD, the tokens that are also kept whole [2 * H, K, D], and where_HK, which they are,
    int32 [H, K]. t, unmerged: of the share.
    """

    t: float = 0.5
    unmerged: Fraction = Fraction(0)
    norms_HN: Tensor = field(default=NOTHING)
    whole_HKD: Tensor = field(default=NOTHING)
    where_HK: Tensor = field(default=NOTHING)

    @classmethod
    def of_pairs(cls, x_HND: Tensor, codec: Codec, share: Share, heads: Heads) -> PairStore:
        """Store x, of lower layers and then their upper ones."""
        h, _, d = x_HND.shape
        empty = x_HND.new_empty(h // 2, 0, d)
        found = cls(
            codec,
            (),
            empty,
            first_HND=empty if codec.sinks else None,
            t=share.t,
            unmerged=share.unmerged,
            norms_HN=x_HND.new_empty(h, 0),
            whole_HKD=x_HND.new_empty(h, 0, d),
            where_HK=torch.empty(h // 2, 0, dtype=torch.int32, device=x_HND.device),
        ).append(x_HND, heads)
        assert isinstance(found, PairStore)
        return found

    def append(self, x_HND: Tensor, heads: Heads | None = None) -> TokenStore:
        """Merge the directions of new tokens [2 * H, L, D] and add them; those most apart are kept whole too."""
        n, new = self.n, int(x_HND.shape[1])
        lower, upper = x_HND.chunk(2)
        directions, norms, cosines = merged(lower, upper, self.t)
        some = None if heads is None else replace(heads, layers=heads.layers[: len(heads.layers) // 2])
        grown = super().append(directions.to(x_HND.dtype), some)
        chosen = most_apart(cosines, whole_tokens(self.unmerged, n + new) - whole_tokens(self.unmerged, n))
        both = chosen.repeat(2, 1)[..., None].expand(-1, -1, x_HND.shape[2])
        assert isinstance(grown, PairStore)
        return replace(
            grown,
            changed=grown.changed or whole_tokens(self.unmerged, n + new) < n + new,
            norms_HN=torch.cat((self.norms_HN, norms.to(x_HND.dtype)), 1),
            whole_HKD=torch.cat((self.whole_HKD, x_HND.gather(1, both)), 1),
            where_HK=torch.cat((self.where_HK, (chosen + n).int()), 1),
        )

    @property
    def plain(self) -> bool:
        """Never: directions are read with their magnitudes."""
        return False

    def read(self, dtype: torch.dtype, heads: slice = ALL) -> Tensor:
        """All tokens of these of the 2 * H heads, restored, [H', N, D] in `dtype`."""
        start, stop, _ = heads.indices(len(self.norms_HN))
        out = self.norms_HN.new_empty(stop - start, self.n, self.tail_HND.shape[2], dtype=dtype)
        self.write_to(out, slice(start, stop))
        return out

    def write_to(self, out_HND: Tensor, heads: slice = ALL) -> None:
        """Restore all tokens of these of the 2 * H heads into out_HND: magnitude times direction, or the whole token."""
        h = len(self.where_HK)
        start, stop, _ = heads.indices(2 * h)
        directions = out_HND.new_empty(h, *out_HND.shape[1:], dtype=torch.float32)
        super().write_to(directions)
        rows = torch.arange(start, stop, device=directions.device)
        restored = directions[rows % h].mul_(self.norms_HN[start:stop, :, None].float())
        where = self.where_HK[rows % h].long()[..., None].expand(-1, -1, directions.shape[2])
        out_HND.copy_(restored.scatter_(1, where, self.whole_HKD[start:stop].float()))

    def exact(self) -> Tensor:
        raise AssertionError("merged tokens are not exact")

    def take(self, index_HM: Tensor, chosen: TokenIndex) -> TokenStore:
        raise AssertionError("stacks that evict from merged layers are refused")

    def encoded_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(byte kind, tensor) of the directions, the magnitudes, and the tokens that are kept whole."""
        yield from super().encoded_tensors()
        yield "metadata", self.norms_HN
        yield "metadata", self.where_HK
        yield "tail", self.whole_HKD
