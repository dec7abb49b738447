"""What an attention module is to our stores: the same in every forward, so it is found once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.kv.families.latent import Latent
from harness.kv.families.temperature import Temperature, temperature_of
from harness.kv.honoured import layer_of, unsupported
from harness.kv.shape import LayerShape, ModelShape


@dataclass(frozen=True, eq=False)
class Seat:
    """number: of the module's layer in the model. layer: in whose store it attends, by its index in the model's shape.

    reads: it only reads that store, which is another layer's. latent: how what is stored becomes keys and values, None if it is
    them. temperature: of queries that attention scales.
    """

    number: int
    layer: int
    reads: bool
    shape: LayerShape
    latent: Latent | None
    temperature: Temperature | None


def seat_of(module: torch.nn.Module, shape: ModelShape, latents: Sequence[Latent | None]) -> Seat:
    """The seat of an attention module. UserError if its layer has no place in the model's cache."""
    number = layer_of(module)
    reads = number not in shape.places
    layer = shape.owners.get(number) if reads else shape.places[number]
    if layer is None:
        raise unsupported(f"its layer {number} attends, and has no place in its cache")
    latent = latents[layer] if latents else None
    return Seat(number, layer, reads, shape.layers[layer], latent, temperature_of(module))
