"""Checks on the model itself that the rotation of stored keys can be undone.

Some families rotate only some layers, or scale or normalize keys after the rotation, and no setting says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from harness.kv.compat import EntryCache, device_of, forward
from harness.kv.families.latent import Latent
from harness.kv.forward import CURRENT, Forward
from harness.kv.rope import LayerRope
from harness.kv.shape import ModelShape
from harness.stages.protocols import Needs
from harness.stages.transfers import fetched

TOKENS, SHIFT = 6, 7
NEAR = 0.05  # relative to the largest key: above the error of bf16 layers, below that of a wrong angle

Ropes = tuple[LayerRope | None, ...]


@torch.inference_mode()
def checked_ropes(
    model: PreTrainedModel,
    shape: ModelShape,
    groups: tuple[tuple[int, ...], ...],
    ropes: Ropes,
    cache: Cache | None = None,
    latents: Sequence[Latent | None] = (),
) -> tuple[Ropes, bool]:
    """(ropes, None for layers without rotation or with one we cannot undo; whether a layer is found to be of the latter kind).

    RoPE attention depends on distances only, so the keys of one text at two start positions differ by their rotation alone:
    un-rotated they must be equal. cache: an empty one that the model takes, where it is not as plain as most.
    """
    device = device_of(model.get_input_embeddings())
    if all(rope is None for rope in ropes) or device.type == "meta":  # no weights to run
        return ropes, False
    first = torch.arange(TOKENS, device=device)
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
        forward(
            model,
            first.expand(2, -1),
            torch.stack((first, first + SHIFT)),
            cache or EntryCache(len(shape.layers)),
            [TOKENS - 1],
        )
    finally:
        CURRENT.reset(token)
    verdicts, irreversible = [], False
    for layer, rope in enumerate(ropes):
        group, at = run.places[layer]
        here, there = run.new[group].keys[:, at]
        still, places = _near(here, there, here), torch.arange(TOKENS + SHIFT, device=here.device)
        true = still.new_zeros(())
        if rope is not None:
            true = _near(rope.unrotate(here, places[:TOKENS]), rope.unrotate(there, places[SHIFT:]), here)
        verdicts.append(torch.stack((still, true)))
    found = []
    for rope, verdict in zip(ropes, fetched(verdicts), strict=True):
        still_here, right = verdict.tolist()
        found.append(None if still_here or not right else rope)
        irreversible |= not still_here and not right
    return tuple(found), irreversible


def _near(a: Tensor, b: Tensor, size: Tensor) -> Tensor:
    return (a - b).abs().max() <= NEAR * size.abs().max()
