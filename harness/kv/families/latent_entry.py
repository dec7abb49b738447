"""Where latents enter: what a layer's up-projection is given for new tokens, whatever the version of transformers caches.

transformers 5.24 hands its cache the latent (`kv.attending.latent_cache`), 5.2 the keys and values that were made of it, by
`kv_b_proj`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.kv.families.latent import Latent
from harness.kv.forward import CURRENT
from harness.kv.shape import ModelShape

UP, EXPAND = "kv_b_proj", "expand_kv"  # the second where the cache is read between the two


def latents_of(model: PreTrainedModel, shape: ModelShape) -> tuple[Latent | None, ...]:
    """How each layer's latents become keys and values; () for a model that stores none.

    Layers that do not hand their cache the latents are watched from now on.
    UserError if a layer that should store a latent has no up-projection.
    """
    if all(layer.expanded is None for layer in shape.layers):
        return ()
    layers = {int(m.layer_idx): m for m in model.get_decoder().modules() if hasattr(m, UP)}
    found: list[Latent | None] = []
    for i, layer in enumerate(shape.layers):
        if layer.expanded is None:
            found.append(None)
            continue
        number = shape.of_model([i])[0]
        if number not in layers:
            raise UserError(f"this model is not supported: layer {number} stores a latent and has no {UP} that expands it")
        up, handed = getattr(layers[number], UP), hasattr(layers[number], EXPAND)
        if not handed:
            _watch(up, i)
        found.append(Latent(up, layer.expanded, layer.d_key, model.dtype, handed))
    return tuple(found)


def _watch(up: torch.nn.Module, layer: int) -> None:
    """Note what an up-projection is given first in a forward; what attention expands later is not new."""
    if not any(isinstance(hook, partial) and hook.func is _entered for hook in up._forward_pre_hooks.values()):
        up.register_forward_pre_hook(partial(_entered, layer))


def _entered(layer: int, up: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
    run = CURRENT.get(None)
    if run is not None and layer not in run.stats:
        run.entering[layer] = args[0]
