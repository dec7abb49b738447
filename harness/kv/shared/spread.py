"""Stored heads as the model's heads read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.kv.token_store import TokenStore


@dataclass(frozen=True)
class Spread:
    """A store of which every head is read by `times` neighbouring heads of the model.

    basis_HDD: of the H heads of the model that read the chosen part, turned back by it; None if they read what is stored.
    """

    store: TokenStore
    times: int
    basis_HDD: Tensor | None = None

    @property
    def n(self) -> int:
        """Tokens per head."""
        return self.store.n

    def write_to(self, out_HND: Tensor, heads: slice) -> None:
        """Decode all tokens of these stored heads into out_HND, which has `times` heads for each of them."""
        if self.times == 1:
            self.store.write_to(out_HND, heads)
            return
        if self.basis_HDD is None:
            found = self.store.read(out_HND.dtype, heads)
            out_HND.copy_(found.repeat_interleave(self.times, 0))
        else:
            found = self.store.read(torch.float32, heads).repeat_interleave(self.times, 0)
            out_HND.copy_(found @ self.basis_HDD.float().mT)
