"""RoPE and its inverse for each layer, with the model's own rotary embedding."""

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

from harness.kv.compat import decoder_of
from harness.kv.families.rotations import rotation_of

LENGTH_DEPENDENT = (
    "dynamic",
    "longrope",
)  # RoPE types whose angles depend on the length of the text: stored keys cannot be rotated back

APPLY = ["q", "k", "cos", "sin"]


@dataclass(frozen=True)
class LayerRope:
    """Satisfies `stages.protocols.Rope` for layers of one type. Computed in fp32.

    halves: cos and sin hold an angle once for both channels it turns (gpt_oss), not twice.
    """

    rotary: torch.nn.Module
    apply: Callable[..., tuple[Tensor, Tensor]]
    layer_type: str | None = None
    halves: bool = False

    def rotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Apply the rotation of position pos_N[n] to x[..., n, :], x [..., N, D]; pos may be [H, N], one row for each head."""
        return self._apply(x, *self._angles(pos_N, x.device))

    def unrotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Undo `rotate`, including an attention scaling that is part of cos and sin (yarn)."""
        cos, sin = self._angles(pos_N, x.device)
        scale = cos.square() + sin.square()
        return self._apply(x, cos / scale, -sin / scale)

    def range(self, x: Tensor, start: int) -> Tensor:
        """`rotate` for the positions start, start + 1, ...; x [..., N, D]."""
        return self._apply(x, *_range_angles(self, start, x.shape[-2], x.device))

    def _angles(self, pos: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        kwargs = {} if self.layer_type is None else {"layer_type": self.layer_type}
        ids = pos[None] if pos.ndim == 1 else pos
        cos, sin = self.rotary(torch.empty(1, dtype=torch.float32, device=device), ids.to(device), **kwargs)
        return cos.to(device), sin.to(device)  # a device map gives the module a device of its own

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = cos.shape[-1] * (2 if self.halves else 1)  # some families rotate only the first channels of a head
        first = x[..., :n].float().reshape(cos.shape[0], -1, x.shape[-2], n)
        rotated, _ = self.apply(first, first[:, :1], cos, sin)
        rotated = rotated.reshape(*x.shape[:-1], n).to(x.dtype)
        return rotated if n == x.shape[-1] else torch.cat([rotated, x[..., n:]], -1)


@lru_cache(maxsize=16)
def _range_angles(rope: LayerRope, start: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return rope._angles(torch.arange(start, start + n, device=device), device)


def ropes_of(model: PreTrainedModel, n_layers: int) -> tuple[tuple[LayerRope | None, ...], bool]:
    """(rotary embedding of each layer, whether the model has rotary positions that cannot be undone).

    The embeddings are None if there are no rotary positions, if their angles depend on the length of the text, or if the family
    applies them in another way than `apply_rotary_pos_emb(q, k, cos, sin)`.
    """
    decoder = decoder_of(model)
    rotary, apply = rotation_of(sys.modules[type(decoder).__module__], getattr(decoder, "rotary_emb", None))
    config = model.config.get_text_config(decoder=True)
    if rotary is None or apply is None or varies_with_length(config) or list(inspect.signature(apply).parameters)[:4] != APPLY:
        return (None,) * n_layers, rotary is not None
    typed = isinstance(rotary, torch.nn.Module) and "layer_type" in inspect.signature(rotary.forward).parameters
    halves = _in_halves(apply)
    if not typed:
        return (LayerRope(rotary, apply, None, halves),) * n_layers, False
    without = {kind for kind, given in (getattr(config, "rope_parameters", None) or {}).items() if given is None}
    return tuple(None if kind in without else LayerRope(rotary, apply, kind, halves) for kind in config.layer_types), False


def _in_halves(apply: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Whether a family's rotation takes each angle once: then heads as wide as cos do not fit it."""
    x, cos = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 4)
    try:
        apply(x, x, cos, cos)
    except RuntimeError:
        return True
    return False


def varies_with_length(config: Any) -> bool:
    """Whether a decoder's RoPE angles depend on the length of the text."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    settings = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    return any(one.get("rope_type", one.get("type")) in LENGTH_DEPENDENT for one in settings)
