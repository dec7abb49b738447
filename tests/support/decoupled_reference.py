"""TransMLA's attention, slowly and in float64 from its definition, in stock transformers; it knows no class of ours.

Of tokens of earlier forwards every head reads what is left of its key: in each channel pair the part along the first mixed heads,
rotated, and of the rest, without rotation, and of the values, the part along the first components. RoPE is Llama's, by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from tests.support.masked_reference import next_logits

NAME = "decoupled_reference"
_CURRENT: ContextVar[Sequence[Fitted]] = ContextVar("decoupled_reference")


def rotation(pos: int, d: int, theta: float = 10_000.0) -> Tensor:
    """Llama's rotation of a position, as a matrix [D, D] to multiply from the left."""
    out = torch.zeros(d, d, dtype=torch.float64)
    for i in range(d // 2):
        angle = torch.tensor(pos * theta ** (-2 * i / d), dtype=torch.float64)
        out[i, i] = out[i + d // 2, i + d // 2] = angle.cos()
        out[i, i + d // 2], out[i + d // 2, i] = -angle.sin(), angle.sin()
    return out


@dataclass
class Fitted:
    """Of one layer: keeps [D/2, H, H], the projection on the mixed heads that stay rotated, and components [E, C], ratio."""

    keeps: Tensor
    components: Tensor
    ratio: float

    @classmethod
    def on(cls, k_HND: Tensor, v_HND: Tensor, rope_heads: int, numbers: int) -> Fitted:
        """From keys before RoPE and values of a text, by singular values. numbers: d_c."""
        k, v = k_HND.double(), v_HND.double()
        h, n, d = k.shape
        keeps = torch.empty(d // 2, h, h, dtype=torch.float64)
        for i in range(d // 2):
            samples = torch.cat((k[:, :, i], k[:, :, i + d // 2]), 1).T  # [2 N, H]
            axes = torch.linalg.svd(samples, full_matrices=False)[2][:rope_heads]
            keeps[i] = axes.T @ axes
        rest = (k - cls(keeps, k, 1.0).kept(k)).transpose(0, 1).reshape(n, -1)
        flat = v.transpose(0, 1).reshape(n, -1)
        ratio = 1.0
        if rope_heads < h:
            ratio = float((rest.square().sum() / (n * (h - rope_heads) * d) / flat.square().mean()).sqrt())
        components = torch.linalg.svd(torch.cat((rest / ratio, flat), 1), full_matrices=False)[2][:numbers].T
        return cls(keeps, components, ratio)

    def kept(self, k_HND: Tensor) -> Tensor:
        """The part of keys that stays rotated: it commutes with every rotation."""
        half = k_HND.shape[-1] // 2
        return torch.stack([self.keeps[i % half] @ k_HND[..., i] for i in range(2 * half)], -1)

    def read(self, k_HND: Tensor, v_HND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rotated part of keys before RoPE, their rest, values) [H, N, D], as they are read."""
        h, n, d = k_HND.shape
        part = self.kept(k_HND)
        both = torch.cat(((k_HND - part).transpose(0, 1).reshape(n, -1) / self.ratio, v_HND.transpose(0, 1).reshape(n, -1)), 1)
        found = both @ self.components @ self.components.T
        rest, values = found[:, : h * d] * self.ratio, found[:, h * d :]
        return part, rest.reshape(n, h, d).transpose(0, 1), values.reshape(n, h, -1).transpose(0, 1)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, Q, L, D]; key and value [1, H, N, D] of every token seen, rotated."""
    fitted = _CURRENT.get()[int(module.layer_idx)]  # type: ignore[arg-type]
    q, k, v = (x[0].double() for x in (query, key, value))
    (n_q, new, d), (h, n, _) = q.shape, k.shape
    old, turns = n - new, [rotation(pos, d) for pos in range(n)]
    before = torch.stack([k[:, t] @ turns[t] for t in range(n)], 1)  # k R^-1, row by row
    part, rest, values = fitted.read(before[:, :old], v[:, :old]) if old else (before[:, :0], before[:, :0], v[:, :0])
    out = torch.zeros(n_q, new, v.shape[-1], dtype=torch.float64)
    for head in range(n_q):
        kv = head // (n_q // h)
        for i in range(new):
            mine = q[head, i]
            flat = mine @ turns[old + i]
            scores = [float(mine @ (turns[t] @ part[kv, t]) + flat @ rest[kv, t]) for t in range(old)]
            scores += [float(mine @ k[kv, t]) for t in range(old, old + i + 1)]
            weights = (torch.tensor(scores, dtype=torch.float64) * (d**-0.5 if scaling is None else scaling)).softmax(0)
            out[head, i] = weights @ torch.cat((values[kv], v[kv, old : old + i + 1]))
    return out.to(query.dtype).transpose(0, 1)[None], None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


class DecoupledCache:
    """A stock cache of every token, of which later tokens read what is left. fitted: by layer."""

    def __init__(self, model: PreTrainedModel, fitted: Sequence[Fitted]) -> None:
        assert model.config._attn_implementation == NAME
        self.model, self.fitted, self.cache, self.seen = model, fitted, DynamicCache(), 0

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Last logits [V] after new tokens."""
        token = _CURRENT.set(self.fitted)
        try:
            logits = next_logits(self.model, self.cache, self.seen, tokens)
        finally:
            _CURRENT.reset(token)
        self.seen += len(tokens)
        return logits
