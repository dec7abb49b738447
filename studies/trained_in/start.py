"""Where training starts: queries and keys alike, so that a token attends to tokens like itself.

After "Mimetic initialization of self-attention layers" (Trockman and Kolter, 2023, arXiv:2305.09828). From plain random weights
plain attention did not find recall within a minute of a CPU.
"""

from __future__ import annotations

import torch
from torch import nn

SPREAD = 0.125  # of a query's weights: a token meets itself at a logit of about 4, after RMSNorm at this width
NORMED = 0.25  # of a query norm: the same where queries and keys are normed and not scaled


@torch.no_grad()
def start_alike(model: nn.Module) -> None:
    """Makes the keys of every layer those of its queries, in place; a layer that reads another's store has queries alone."""
    owner = None
    for layer in model.model.layers:  # type: ignore[union-attr]
        attention = layer.self_attn
        if hasattr(attention, "kv_b_proj"):
            _latent(attention)
            continue
        owner = attention if getattr(attention, "k_proj", None) is not None else owner
        nn.init.normal_(attention.q_proj.weight, std=SPREAD)
        _plain(attention, owner, copy=attention is owner)


def _plain(attention: nn.Module, owner: nn.Module, *, copy: bool) -> None:
    """All queries of a group start as its key; `copy` makes the key first."""
    dim = attention.head_dim
    query_HDW = attention.q_proj.weight.view(-1, dim, attention.q_proj.in_features)
    key_HDW = owner.k_proj.weight.view(-1, dim, owner.k_proj.in_features)
    group = len(query_HDW) // len(key_HDW)
    if copy:
        key_HDW.copy_(query_HDW[::group])
    query_HDW.copy_(key_HDW.repeat_interleave(group, 0))
    if hasattr(attention, "q_norm"):
        attention.q_norm.weight.fill_(NORMED)


def _latent(attention: nn.Module) -> None:
    """Queries as the keys that the latent gives: its own part through both projections, the rotated part as it is."""
    rank, plain = attention.kv_lora_rank, attention.qk_nope_head_dim
    nn.init.normal_(attention.kv_a_proj_with_mqa.weight, std=SPREAD)
    nn.init.normal_(attention.kv_b_proj.weight, std=rank**-0.5)
    down_CW, rotated_RW = attention.kv_a_proj_with_mqa.weight.split([rank, attention.qk_rope_head_dim])
    up_HDC = attention.kv_b_proj.weight.view(attention.num_heads, -1, rank)
    query_HDW = attention.q_proj.weight.view(attention.num_heads, -1, attention.q_proj.in_features)
    query_HDW[:, :plain] = up_HDC[:, :plain] @ down_CW
    query_HDW[:, plain:] = rotated_RW
