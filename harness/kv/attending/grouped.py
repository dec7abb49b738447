"""Transformers' own sdpa, without copies where it would write keys and values out once for every query head of a group.

torch's CPU kernel reads them as they lie, with the same bits; the copies cost more than a masked call of few queries itself.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.kv.attending.call import Call


def sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Output [R, L, Q, D] of queries [R, Q, L, D] over keys and values [R, H, N, D]."""
    repeats = mask is not None and q.shape[2] > 1 and q.shape[1] > k.shape[1]  # of one query, transformers packs a group
    if repeats and _plain(call, q, k, v) and _reads_groups(q.dtype):
        return _grouped(q, k, v, mask, call.scaling).transpose(1, 2).contiguous()
    out: Tensor = sdpa_attention_forward(call.module, q, k, v, mask, scaling=call.scaling, **call.kwargs)[0]
    return out


def _plain(call: Call, q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and not call.kwargs.get("dropout") and not q.requires_grad and k.shape[3] == v.shape[3]


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)


@cache
def _reads_groups(dtype: torch.dtype) -> bool:
    """Whether this torch gives groups the bits that repeated keys and values have: tried once, on noise."""
    seed = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 16, generator=seed).to(dtype) for h, n in ((4, 3), (2, 70), (2, 70)))
    mask = torch.ones(3, 70, dtype=torch.bool).tril(67)
    repeated = _grouped(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask, 0.25)
    return torch.equal(_grouped(q, k, v, mask, 0.25), repeated)
