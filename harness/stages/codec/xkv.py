"""xKV: one basis over a group of layers, found on the prompt itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.stages.bases import principal
from harness.stages.codec.projected import Projected
from harness.stages.encoded import Heads


@dataclass(frozen=True, kw_only=True)
class XKV(Projected):
    """xKV (arXiv 2503.18893; kvpress: none): the keys, or the values, of all heads of `layers` layers have one left factor.

    After the prompt [X_1 ... X_L] = A [B_1^T ... B_L^T], cut to its largest singular values: A, rank numbers a token, is stored
    once for the group, B_l once a prompt for each layer. The paper's ranks are 512 for keys and 768 for values of four layers.
    A holds the singular values; the authors' code gives each factor their square roots, which matters only to `inner`.
    The paper's keys are stored before RoPE: compress.rope=pre. Tokens after the prompt stay exact, as in the paper.
    The rank is given per token, layer and KV head: times the number of both it is that of the group.
    """

    name: str = "xkv"
    layers: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = isinstance(self.layers, int) and self.layers > 0
        require(ok, "codec.layers", self.layers, "a positive number of layers that share coefficients")
        said = "it must be known before the prompt is: legal are numbers, fraction, bytes"
        require(self.rank.known, "codec.rank.unit", self.rank.unit, said)
        for key in ("sinks", "recent"):
            require(not getattr(self, key), f"codec.{key}", getattr(self, key), "the whole prompt is decomposed: 0")

    @property
    def joint(self) -> bool:
        return True

    @property
    def layers_together(self) -> int:
        return self.layers

    @property
    def once(self) -> bool:
        return True

    def together(self, h: int) -> int:
        return h * self.layers

    def leaving(self, tail: int, encoded: int) -> int:
        """All of the prompt, in whole flushes; nothing later."""
        return 0 if encoded else super().leaving(tail, encoded)

    def check_heads(self, heads: int, layers: int) -> None:
        """Layers must fall into groups."""
        if layers % self.layers:
            legal = ", ".join(str(some) for some in range(1, layers + 1) if layers % some == 0)
            raise UserError(
                f"codec.layers={self.layers} is not possible with {layers} layers that are alike: legal are {legal}"
            )

    def info(self) -> dict[str, object]:
        return {**super().info(), "basis": "prompt", "layers": self.layers}

    def vectors(self, x_HND: Tensor, heads: Heads, q: int) -> Tensor:
        (h, n, d), s = x_HND.shape, self.together(heads.each)
        self.check_heads(heads.each, len(heads.layers))  # fewer lie together where their rotation or device differs
        found = []
        for some in x_HND.split(s):  # type: ignore[no-untyped-call]
            side = some.transpose(0, 1).reshape(n, s * d).cpu().double()  # on the host: not every device has float64
            found.append(principal(side.T @ side)[0][:, : s * q])
        return torch.stack(found).reshape(h, d, s * q)
