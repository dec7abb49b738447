"""Latents: a layer that stores fewer numbers than keys and values have, and expands them when attention reads (MLA).

DeepSeek-V2 (arXiv 2405.04434): a token stores c_KV of width d_c, which all heads share, and a rotated key part of width d_r,
which all heads share too. Head h has the key [W_k,h c_KV ; rotated part] and the value W_v,h c_KV. Here the rotated part is
stored as the key of one head, the latent as its value: positions, codecs, evictions and bytes are those of any other store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.kv.shape import Expanded
from harness.stages.protocols import LayerView, Rope

HOLDS = {"keys": "rotated part of keys, shared by all heads", "values": "latent of keys and values, shared by all heads"}
"""What the codecs of keys and of values encode in a layer that stores latents, for the record."""


@dataclass(frozen=True)
class Latent:
    """How one layer's stored parts become keys and values: by its own up-projection.

    up: [..., d_c] to [..., heads * (d_plain + d_value)], head by head its plain key channels, then its value. d_rope: width of
    the shared rotated part, the last channels of every key. dtype: what `up` computes in. handed: the layer hands its cache the
    latents, and expands those that it gets back.
    """

    up: torch.nn.Module
    shape: Expanded
    d_rope: int
    dtype: torch.dtype
    handed: bool = False

    def expand(self, rope_R1ND: Tensor, latent_R1NC: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [R, H, N, D] and values [R, H, N, D'] of R rows, as the layer itself expands them."""
        (r, _, n, _), plain = latent_R1NC.shape, self.shape.d_key - self.d_rope
        up: Tensor = self.up.forward(latent_R1NC)  # past its hooks, which watch what the layer itself gives it
        both_RHND = up.view(r, n, self.shape.heads, plain + self.shape.d_value).transpose(1, 2)
        k_RHND = torch.cat((both_RHND[..., :plain], rope_R1ND.to(both_RHND.dtype).expand(-1, self.shape.heads, -1, -1)), -1)
        return k_RHND, both_RHND[..., plain:]

    def parts(self, key_BHLD: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored of new tokens: the rotated part [B, 1, L, d_r] of their keys, and their latents [B, 1, L, d_c]."""
        return key_BHLD[:, :1, :, key_BHLD.shape[-1] - self.d_rope :], latent.view(len(key_BHLD), 1, -1, latent.shape[-1])

    def rope(self, stored: Rope) -> Rope:
        """The rotation of expanded keys and of queries, given that of the stored part."""
        return LastChannels(stored, self.d_rope)


@dataclass(frozen=True)
class LastChannels:
    """A rotation of the last d channels only. Satisfies `stages.protocols.Rope`."""

    rope: Rope
    d: int

    def rotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Apply the rotation of position pos_N[n] to x[..., n, -d:]."""
        return torch.cat((x[..., : -self.d], self.rope.rotate(x[..., -self.d :], pos_N)), -1)

    def unrotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Undo rotate."""
        return torch.cat((x[..., : -self.d], self.rope.unrotate(x[..., -self.d :], pos_N)), -1)


class _Reading:
    """Keys and values of a view of one layer, expanded together when one of them is first asked for."""

    def __init__(self, stored: LayerView, latent: Latent) -> None:
        self.stored, self.latent = stored, latent

    @cached_property
    def both(self) -> tuple[Tensor, Tensor]:
        parts = (x[None].to(self.latent.dtype) for x in (self.stored.read_keys(), self.stored.read_values()))
        k, v = (x[0].float() for x in self.latent.expand(*parts))
        return k, v

    def keys(self) -> Tensor:
        return self.both[0]

    def values(self) -> Tensor:
        return self.both[1]


def expanded(view: LayerView, latents: Sequence[Latent | None]) -> LayerView:
    """A view of stored parts as scorers see it: with the keys and values of all heads, which share one set of tokens.

    Itself where keys and values are stored. latents: by layer.
    """
    latent = latents[view.layer] if latents else None
    if latent is None:
        return view
    if view.each:  # layers of one view are alike
        each = view.each.map(lambda one: expanded(one, latents))
        return replace(
            _of_heads(view, latent),
            read_keys=lambda: torch.cat([one.k_HND for one in each]),
            read_values=lambda: torch.cat([one.v_HND for one in each]),
            each=each,
        )
    reading = _Reading(view, latent)
    return replace(_of_heads(view, latent), read_keys=reading.keys, read_values=reading.values)


def _of_heads(view: LayerView, latent: Latent) -> LayerView:
    """Positions and column sums repeated for every head that shares them."""
    heads, sums = latent.shape.heads, view.stats.column_sums_HN
    stats = view.stats if sums is None else replace(view.stats, column_sums_HN=sums.repeat_interleave(heads, 0))
    rope = None if view.rope is None else latent.rope(view.rope)
    return replace(view, pos_HN=view.pos_HN.repeat_interleave(heads, 0), stats=stats, rope=rope, shared=True)
