"""Layers that store a rotated part of their keys and one latent for the rest and the values, as attention reads them.

Attention takes q . k over twice the head dim, [query ; query at position 0] . [rotated part ; rest], as the rest of the keys
has no position. New tokens are exact, so that theirs is [key ; 0].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.kv.rope import LayerRope
from harness.kv.shared.spread import Spread
from harness.kv.token_store import TokenStore
from harness.stages.codec.tiled import tiled_product
from harness.stages.share.sharing import Bases, Maps, Share
from harness.stages.transfers import places
from harness.types import KV

Ropes = Sequence[LayerRope | None]


def entering(share: Share, layers: tuple[int, ...], new: KV, ropes: Ropes) -> KV:
    """What is stored of new tokens of these layers [layers * H, L, D]: the two parts, [layers, L, d_r] and [layers, L, d_c].

    The layers are alike, and so have one rotation.
    """
    rope, heads = ropes[layers[0]], len(new.k_HND) // len(layers)
    assert rope is not None, "models without rotary positions are refused"
    k_HND, v_HND = new.k_HND.float(), new.v_HND.float()
    pos_HN = places(new.start, new.n, k_HND.device).expand(len(k_HND), -1)
    by_layer = (x.split(heads) for x in (k_HND, at_zero(rope, k_HND, pos_HN), v_HND))  # type: ignore[no-untyped-call]
    sizes = heads, k_HND.shape[2], v_HND.shape[2], k_HND.device
    parts = [_parts(share.maps(layer, *sizes), *one) for layer, *one in zip(layers, *by_layer, strict=True)]
    k, v = (torch.stack(side).to(new.k_HND.dtype) for side in zip(*parts, strict=True))
    return KV(k, v, new.start)


def _parts(maps: Maps, k_HND: Tensor, flat_HND: Tensor, v_HND: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts [N, d_r] and [N, d_c] of one layer's keys, the same at position 0, and values."""
    turns_HDR, down_HEC = maps.up.keys, maps.down_HEC
    rest_HND = flat_HND - unmixed(mix(flat_HND, turns_HDR), turns_HDR)
    both_NE = torch.cat((rest_HND, v_HND), 2).transpose(0, 1).flatten(1)
    return mix(k_HND, turns_HDR).flatten(1), tiled_product(both_NE, down_HEC.flatten(0, 1))


def mix(x_HND: Tensor, turns_HDR: Tensor) -> Tensor:
    """Heads mixed channel by channel, [N, R, D]; one head after another, so that a token's numbers do not depend on others."""
    out = x_HND.new_zeros(x_HND.shape[1], turns_HDR.shape[2], x_HND.shape[2])
    for x_ND, turn_DR in zip(x_HND, turns_HDR, strict=True):
        out += x_ND[:, None] * turn_DR.T
    return out


def unmixed(part_NRD: Tensor, turns_HDR: Tensor) -> Tensor:
    """What a mix holds of every head, [H, N, D]."""
    return torch.stack([(part_NRD * turn_DR.T).sum(1) for turn_DR in turns_HDR])


def at_zero(rope: LayerRope, x: Tensor, pos_HN: Tensor) -> Tensor:
    """Rotated vectors [H, N, D] as position 0 has them: without rotation, but with the scaling that some models put there."""
    return rope.rotate(rope.unrotate(x, pos_HN), torch.zeros_like(pos_HN))


@dataclass(frozen=True)
class Folded(Spread):
    """Keys [rotated part ; rest], or values, of a layer's H heads.

    store: what holds the rotated parts. latent: what holds the rest. bases: of the layer. values: whether values are read.
    """

    latent: TokenStore | None = None
    bases: Bases | None = None
    values: bool = False

    def write_to(self, out_HND: Tensor, heads: slice) -> None:
        """Decode all tokens of one layer into out_HND: keys of twice the head dim, or values."""
        assert self.bases is not None and self.latent is not None
        turns_HDR, up_HEC = (x.float() for x in self.bases)
        d = turns_HDR.shape[1]
        latent_NC = self.latent.read(torch.float32, heads)[0]
        if not self.values:
            part_NC = self.store.read(torch.float32, heads)[0]
            out_HND[..., :d] = unmixed(part_NC.unflatten(1, (-1, d)), turns_HDR)  # type: ignore[no-untyped-call]
        for head, up_EC in enumerate(up_HEC):
            chosen = up_EC[d:] if self.values else up_EC[:d]
            out_HND[head, :, 0 if self.values else d :] = tiled_product(latent_NC, chosen.T)
