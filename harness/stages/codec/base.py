"""The codec protocol: how keys or values are stored in fewer bytes.

To add a codec: one class that satisfies the protocol, one YAML in `conf/codec` with its `_target_`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from harness.stages.bases import Span
from harness.stages.encoded import Encoded, Heads
from harness.stages.limits import Calibration, Fitting, Limits
from harness.stages.protocols import Needs


class Codec(Protocol):
    """Encodes keys or values x [H, N, D] of H KV heads, N tokens and head dim D.

    Tokens are encoded once, oldest first, and never again. Inherit, set a `name`, and write `encode`, `decode` and `nbytes`;
    the other members have defaults. The H heads may belong to several layers: treat each head by itself (or layer: `joint`).
    """

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int:
        """Tokens that share metadata; 1 if tokens are independent, so that single ones can be evicted later."""
        return 1

    @property
    def flush(self) -> int:
        """Tokens that are encoded together, a multiple of block."""
        return self.block

    @property
    def residual(self) -> int:
        """Newest tokens that stay exact (and up to flush - 1 more, until there are enough to be encoded together)."""
        return 0

    @property
    def sinks(self) -> int:
        """First tokens that always stay exact: keys of attention sinks are outliers."""
        return 0

    def leaving(self, tail: int, encoded: int) -> int:
        """How many of the `tail` newest, still exact tokens are encoded now (oldest first), a multiple of flush.

        encoded: tokens encoded before.
        """
        return max(tail - self.residual, 0) // self.flush * self.flush

    @property
    def lossy(self) -> bool:
        """False only if decoding returns the encoded numbers bit for bit."""
        return True

    @property
    def by_tokens(self) -> bool:
        """True if some of the tokens (whole blocks) or heads can be decoded alone, with the same bits as all together."""
        return False

    @property
    def joint(self) -> bool:
        """True if the KV heads of a layer are encoded together, so that they stay, and are decoded, together.

        Tensors of an `Encoded` may then have layers on their first axis instead of heads.
        """
        return False

    @property
    def aligned(self) -> bool:
        """True if heads that are encoded together must hold the same tokens: a row of numbers is that of one token in all."""
        return False

    @property
    def layers_together(self) -> int:
        """How many layers are encoded together, so that their heads must lie together."""
        return 1

    @property
    def once(self) -> bool:
        """True if its constants are those of the tokens that are encoded first, and later tokens stay exact."""
        return False

    def info(self) -> dict[str, object]:
        """For the record: bits, axis, group, and where scales come from (unit, dynamic, frozen, calibrated)."""
        return {"codec": self.name}

    def check(self, head_dim: int) -> None:
        """Raise UserError if this head dim cannot be encoded."""

    def check_heads(self, heads: int, layers: int) -> None:
        """Raise UserError if `layers` layers that are alike, of so many KV heads, cannot be encoded."""
        return None

    def for_role(self, role: str) -> Codec:
        """The codec for "keys" or for "values"."""
        return self

    @property
    def calibration(self) -> Calibration | None:
        """The text to measure its constants on before anything is encoded; None if it has none."""
        return None

    @property
    def fitting(self) -> Fitting | None:
        """The codebook to fit on the text of its `calibration`; None if it needs limits only."""
        return None

    @property
    def span(self) -> Span | None:
        """The basis to find before anything is encoded; None if it needs none."""
        return None

    def calibrated(self, limits: Limits) -> Codec:
        """The codec with what was measured for its `calibration`."""
        return self

    @property
    def needs(self) -> Needs:
        """Statistics of the context's attention that its constants depend on; `observing` gets them."""
        return Needs()

    def observing(self, queries_HGWD: Tensor, keys_HND: Tensor) -> Codec:
        """The codec that has seen the last W queries of the context, those of each head's group, and the keys that stay."""
        return self

    def fit(self, x_HND: Tensor, heads: Heads) -> Codec:
        """The codec with constants for these heads; called once, with the first tokens to encode."""
        return self

    def of_heads(self, heads: Tensor) -> Codec:
        """A fitted codec for some of its heads (int64 indices): heads are separated when they keep different tokens."""
        return self

    def encode(self, x_HND: Tensor) -> Encoded:
        """Encode [H, N, D], N a multiple of flush; metadata is in x's dtype, or what its format says."""
        ...

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        """Write the decoded tokens into out_HND, in its dtype (attention reads that tensor); returns nothing."""
        ...

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        """(payload, metadata) bytes of n encoded tokens, n a multiple of flush, from a closed formula, padding included."""
        ...
