"""The model's own rotary embedding, layer by layer, forwards and backwards; it knows no store and no policy."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

MOVING = ("dynamic", "longrope")  # their angles change with the length of the text: rows could not be turned back

APPLY = ["q", "k", "cos", "sin"]


@dataclass(frozen=True)
class LayerRope:
    """Satisfies `stages.protocols.Rope` for layers of one type. Computed in fp32."""

    rotary: torch.nn.Module
    apply: Callable[..., tuple[Tensor, Tensor]]
    layer_type: str | None = None

    def rotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Turn row n of x [..., N, D] to position pos_N[n]; pos [H, N] gives every head of x [H, N, D] its own."""
        return self._turn(x, *self._angles(pos_N, x.device))

    def unrotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Undo rotate, an attention scaling folded into the embedding (yarn) included."""
        cos, sin = self._angles(pos_N, x.device)
        scale = cos.square() + sin.square()
        return self._turn(x, cos / scale, -sin / scale)

    def range(self, x: Tensor, start: int) -> Tensor:
        """Turn the rows of x [..., N, D] to the positions start, start + 1, ..."""
        return self._turn(x, *_range_angles(self, start, x.shape[-2], x.device))

    def _angles(self, pos: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        kwargs = {} if self.layer_type is None else {"layer_type": self.layer_type}
        ids = pos[None] if pos.ndim == 1 else pos
        cos, sin = self.rotary(torch.empty(1, dtype=torch.float32, device=device), ids.to(device), **kwargs)
        return cos, sin

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = cos.shape[-1]  # some families rotate only the first channels of a head
        rows = x[..., :n].float().reshape(cos.shape[0], -1, x.shape[-2], n)
        turned, _ = self.apply(rows, rows[:, :1], cos, sin)
        turned = turned.reshape(*x.shape[:-1], n).to(x.dtype)
        return turned if n == x.shape[-1] else torch.cat([turned, x[..., n:]], -1)


@lru_cache(maxsize=16)
def _range_angles(rope: LayerRope, start: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return rope._angles(torch.arange(start, start + n, device=device), device)


def ropes_of(model: PreTrainedModel, n_layers: int) -> tuple[tuple[LayerRope | None, ...], bool]:
    """One for each layer, None where the model has no rotary positions or they move; and whether they move."""
    decoder = model.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    apply = getattr(sys.modules[type(decoder).__module__], "apply_rotary_pos_emb", None)
    config = model.config.get_text_config(decoder=True)
    if rotary is None or apply is None or moves(config) or list(inspect.signature(apply).parameters)[:4] != APPLY:
        return (None,) * n_layers, rotary is not None
    typed = "layer_type" in inspect.signature(rotary.forward).parameters
    types = config.layer_types if typed else [None] * n_layers
    return tuple(LayerRope(rotary, apply, kind) for kind in types), False


def moves(config: Any) -> bool:
    """Whether a decoder's angles change with the length of the text."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    settings = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    return any(one.get("rope_type", one.get("type")) in MOVING for one in settings)
