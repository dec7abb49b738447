"""Low rank: keys or values in a basis found once per model, on calibration text or on its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from torch import Tensor

from harness.errors import UserError, require
from harness.stages.bases import Bases, Span
from harness.stages.codec.projected import Projected
from harness.stages.encoded import Heads
from harness.stages.limits import Calibration, Limits

SPANS = ("text", "weights")


@dataclass(frozen=True, kw_only=True)
class LowRank(Projected):
    """Palu (arXiv 2407.21118; kvpress: none): the basis of a head, of a group of heads or of all heads of a layer.

    of:
        "text": the right singular vectors of the keys or values of calibration text, not centred. For x = u W this is Palu's
            whitened decomposition: with S S^T = E[u^T u], the singular vectors of S^T W that it keeps are those of x itself.
        "weights": of W itself, as by Palu without whitening; a bias counts as one more input. No text is read.
    heads: KV heads that share coefficients (Palu: 4); null for all of a layer; 1 lets tokens be evicted head by head.
    Palu's keys are stored before RoPE: compress.rope=pre. Differs from the authors' code: all layers have one rank, which
    theirs divides by Fisher information; decoding multiplies by B^T, where theirs fuses that of values into the next weight;
    B is orthonormal, where theirs halves the singular values between both factors; a bias is decomposed with the rest, where
    theirs adds it afterwards; and latents are not turned by a Hadamard matrix before they are quantized, unless `inner` does.

    With heads null and rope pre it is also MLA made of GQA: a latent of all keys and one of all values a layer, rotated once
    they are expanded, and equal outputs at full rank. TransMLA's layout (arXiv 2502.07864) is the share `one_latent`.
    """

    name: str = "low_rank"
    heads: int | None = None
    of: str = "text"
    calibration: Calibration | None = None
    bases: Bases | None = field(default=None, repr=False, compare=False)  # set by `calibrated`

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.heads is None or (isinstance(self.heads, int) and self.heads > 0)
        require(ok, "codec.heads", self.heads, "a positive number of KV heads that share coefficients, or null for all")
        require(self.of in SPANS, "codec.of", self.of, f"allowed are {', '.join(SPANS)}")
        text = self.of == "text"
        require(not text or self.calibration is not None, "codec.calibration", None, "codec.of=text needs it")

    @property
    def joint(self) -> bool:
        return self.heads != 1

    @property
    def span(self) -> Span:
        return Span(self.heads, self.of, self.sinks)

    def together(self, h: int) -> int:
        return self.heads or h

    def check_heads(self, heads: int, layers: int) -> None:
        """A layer's KV heads must fall into sets."""
        if heads % self.together(heads):
            legal = ", ".join(str(s) for s in range(1, heads + 1) if heads % s == 0)
            raise UserError(
                f"codec.heads={self.heads} is not possible with {heads} KV heads a layer: legal are {legal}, or null"
            )

    def numbers(self, d: int, itemsize: int) -> int:
        """Also by energy, once the bases are known."""
        if self.rank.known or self.bases is None:
            return super().numbers(d, itemsize)
        held = self.bases.held()
        s = len(held) // d
        rank = int((held < self.rank.value - 1e-9).sum()) + 1
        return next((q for q in range(math.ceil(rank / s), d) if self.fits(q)), d)

    def info(self) -> dict[str, object]:
        about = {"calibration": dict(self.bases.about)} if self.bases and self.of == "text" else {}
        return {**super().info(), "basis": self.of, "heads": self.heads or "all", **about}

    def calibrated(self, limits: Limits) -> LowRank:
        """With the bases that were found."""
        assert isinstance(limits, Bases)
        return replace(self, bases=limits)

    def vectors(self, x_HND: Tensor, heads: Heads, q: int) -> Tensor:
        if self.bases is None:
            raise UserError(f"codec {self.name} has no bases: they are found on a model")
        s = self.together(heads.each)
        return self.bases.of_heads(heads, s, int(x_HND.shape[2]), s * q)
