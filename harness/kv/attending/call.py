"""What a call of attention is about: the layer it belongs to, and the rows and heads that attend in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.kv.attending.seat import Seat
from harness.kv.families.latent import Latent
from harness.kv.forward import Forward
from harness.kv.head_group import Slot
from harness.kv.teams import Views
from harness.stages.softmax import Softmax


@dataclass(eq=False)
class Call:
    """What all rows of one layer's attention share."""

    module: torch.nn.Module
    run: Forward
    seat: Seat
    scaling: float
    softmax: Softmax
    kwargs: dict[str, Any]
    query: Tensor
    given: tuple[Tensor, Tensor] | None = None  # of a latent: new keys and values, as the layer expanded them
    whole: bool = False  # the layer has expanded what is stored as well

    @cached_property
    def scaled_BQD(self) -> Tensor:
        """A single new query of every row times the scaling, fp32."""
        return self.query[:, :, 0].float() * self.scaling

    def records(self, rows: list[int]) -> bool:
        """Whether any of these rows asks for statistics of this layer."""
        watched = self.seat.shape.window is None and not self.seat.reads  # only queries of the store's own layer count
        return watched and not self.run.asking.isdisjoint(rows)

    def expanded(self, latent: Latent, rows: list[int], k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, H', N + L, D'] of what is stored and new, parts of latents [R, 1, N + L, D]."""
        if self.given is not None and k.shape[2] == length:
            key, value = (self.run.pick(x, rows)[:, :, :length] for x in self.given)
            return key, value
        return latent.expand(k, v)


@dataclass(eq=False)
class Part:
    """Some KV heads of a layer in R rows of one shape, where these store them, and the softmax of their queries.

    slots: none before the first token. views: decoded copies of the rows' stores, if they are read from there.
    pos_RHN: positions of the keys, if the softmax looks at them.
    """

    rows: list[int]
    heads: slice
    slots: Sequence[Slot]
    softmax: Softmax
    views: Sequence[Views] | None
    pos_RHN: Tensor | None = None

    def of_rows(self, at: slice) -> Part:
        """The same heads in some of its rows."""
        pos_RHN = None if self.pos_RHN is None else self.pos_RHN[at]
        return Part(self.rows[at], self.heads, self.slots[at], self.softmax, self.views, pos_RHN)
