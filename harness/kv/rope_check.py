"""Checks on the model itself that the rotation of stored keys can be undone.

Some families rotate only some layers, or scale or normalize keys after the rotation, and no setting says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from harness.kv.compat import EntryCache, forward
from harness.kv.families.latent import Latent
from harness.kv.forward import CURRENT, Forward
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.stages.protocols import Needs

TOKENS, SHIFT = 6, 7
NEAR = 0.05  # relative to the largest key: above the error of bf16 layers, below that of a wrong angle

Ropes = tuple[LayerRope | None, ...]


@torch.inference_mode()
def checked_ropes(
    model: PreTrainedModel,
    shape: ModelShape,
    groups: Sequence[tuple[int, ...]],
    ropes: Ropes,
    cache: Cache | None = None,
    latents: Sequence[Latent | None] = (),
) -> tuple[Ropes, bool]:
    """(ropes, None for layers without rotation or with one we cannot undo; whether a layer is found to be of the latter kind).

    RoPE attention depends on distances only, so the keys of one text at two start positions differ by their rotation alone:
    un-rotated they must be equal. cache: an empty one that the model takes, where it is not as plain as most.
    """
    if all(rope is None for rope in ropes) or model.device.type == "meta":  # no weights to run
        return ropes, False
    places = torch.arange(TOKENS, device=model.device) + torch.tensor([[0], [SHIFT]], device=model.device)
    run = Forward(
        shape=shape,
        groups=groups,
        stores=[{}, {}],
        seen=[0, 0],
        lengths=[TOKENS, TOKENS],
        needs=[Needs(), Needs()],
        kv_dtype=torch.float32,
        starts=[0, SHIFT],
        latents=latents,
    )
    token = CURRENT.set(run)
    try:
        ids_BL = torch.arange(TOKENS, device=model.device).expand(2, -1)
        forward(model, ids_BL, places, cache or EntryCache(len(shape.layers)), torch.tensor([-1], device=model.device))
    finally:
        CURRENT.reset(token)
    found, irreversible = [], False
    for layer, rope in enumerate(ropes):
        group, at = run.places[layer]
        here, there = run.new[group][0][:, at]
        still = _near(here, there, here)
        true = rope is not None and _near(rope.unrotate(here, places[0]), rope.unrotate(there, places[1]), here)
        found.append(None if still or not true else rope)
        irreversible |= not still and not true
    return tuple(found), irreversible


def _near(a: Tensor, b: Tensor, size: Tensor) -> bool:
    return bool((a - b).abs().max() <= NEAR * size.abs().max())
