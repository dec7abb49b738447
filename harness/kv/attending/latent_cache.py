"""The cache of models whose layers hand it latents and expand what it gives back: it gives back what is stored as well.

transformers 5.24 does so: a token is expanded once a forward, as in stock, instead of a second time with the stored ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.kv.attending.call import Part
from harness.kv.attending.stored import held
from harness.kv.compat import EntryCache
from harness.kv.forward import CURRENT
from harness.stages.softmax import PLAIN


class LatentCache(EntryCache):
    """It keeps a layer's new latents in the forward, and returns them behind the stored ones of all rows.

    Rows that hold, or are fed, different numbers of tokens are expanded by our attention, and get back what they gave.
    """

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states: latents [B, 1, L, d_c]; value_states: rotated parts [B, 1, L, d_r]. For other layers see `EntryCache`."""
        run = CURRENT.get()
        layer = run.shape.places.get(layer_idx)
        latent = run.latents[layer] if layer is not None else None
        if layer is None or latent is None or not latent.handed:
            return key_states, value_states
        teams = run.alike(layer)
        if len(teams) > 1:
            run.entering[layer] = key_states
            return key_states, value_states
        rope_B1LD, latent_B1LC = run.keep_new(layer, value_states, key_states)
        slots = [slot for row in teams[0].rows for slot in run.stores[row].get(layer, ())]
        part = Part(teams[0].rows, slice(0, 1), slots, PLAIN, teams[0].views)
        rope_B1ND, latent_B1NC = held(run, layer, part, key_states.dtype, rope_B1LD, latent_B1LC)
        run.handed.add(layer)
        return latent_B1NC, rope_B1ND
