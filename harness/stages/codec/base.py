"""What a codec must offer: how rows become bytes and numbers again; it knows no eviction and no model.

A newcomer extends the project here: one class that satisfies the protocol, one YAML with its `_target_`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from harness.stages.encoded import Encoded, Heads
from harness.stages.limits import Calibration, Limits


class Codec(Protocol):
    """How rows are stored. Blocks of rows are encoded once, oldest first, and never again.

    Inherit from it, give it a `name`, and write `encode`, `decode` and `nbytes`; the other members have defaults. The H heads
    of a tensor may be those of many layers at once: treat each head by itself.
    """

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int:
        """Rows that share metadata along the token axis; 1 when rows are independent and can be evicted one by one."""
        return 1

    @property
    def flush(self) -> int:
        """Rows that leave the exact tail together, a multiple of block."""
        return self.block

    @property
    def residual(self) -> int:
        """Newest rows that stay exact (and up to flush - 1 more, until there are enough to leave together)."""
        return 0

    @property
    def sinks(self) -> int:
        """First rows that stay exact for good: attention sinks have keys that no scale fits."""
        return 0

    def leaving(self, tail: int, encoded: int) -> int:
        """Of `tail` exact rows behind `encoded` stored ones, how many leave now, oldest first: a multiple of flush."""
        return max(tail - self.residual, 0) // self.flush * self.flush

    @property
    def lossy(self) -> bool:
        """False only where decoding gives back what was encoded, bit for bit."""
        return True

    @property
    def by_tokens(self) -> bool:
        """True where decoding some of the rows (whole blocks) or heads gives the very bits that decoding all of them gives."""
        return False

    def info(self) -> dict[str, object]:
        """What a record says of the codec: bits, axis, group, scale source (unit, dynamic, frozen, calibrated)."""
        return {"codec": self.name}

    def check(self, head_dim: int) -> None:
        """Raise UserError when rows of this width cannot be encoded."""

    def for_role(self, role: str) -> Codec:
        """The codec for "keys" or for "values"."""
        return self

    @property
    def calibration(self) -> Calibration | None:
        """The text on which its constants are to be measured before anything is encoded, if it needs that."""
        return None

    def calibrated(self, limits: Limits) -> Codec:
        """The codec with the limits that its `calibration` asked for."""
        return self

    def fit(self, x_HND: Tensor, heads: Heads) -> Codec:
        """The codec for exactly these heads, asked once, with the first rows they encode: where constants are fixed."""
        return self

    def of_heads(self, heads: Tensor) -> Codec:
        """A fitted codec for some of its heads (int64 indices), when these come to hold other rows than the rest."""
        return self

    def encode(self, x_HND: Tensor) -> Encoded:
        """Encode n rows, n a multiple of flush; metadata is in x's dtype."""
        ...

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        """Write the n rows into out_HND, a slice of what attention will read, in its dtype."""
        ...

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        """(payload, metadata) bytes of n encoded rows, n a multiple of flush: the closed formula, padding included."""
        ...
