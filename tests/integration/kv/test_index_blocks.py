"""Why a model that chooses its tokens by an index of blocks (qwen4_exp) is refused: an evicted token moves every block after it."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.families.tiny import build, families, tiny_config
from harness.kv.compat import shape_of

FAMILY, TOKENS = "qwen4_exp_text", 41


def _model() -> PreTrainedModel:
    if FAMILY not in families():
        pytest.skip(f"this version of transformers has no {FAMILY}")
    return build(tiny_config(FAMILY), "sdpa")


@torch.inference_mode()
def _chosen(indexer: torch.nn.Module, hidden: int | None) -> list[int]:
    """The tokens that the last of TOKENS tokens attends to by transformers' own index, with one of them hidden from it."""
    x_1TD = torch.randn(1, TOKENS, indexer.index_qk_proj.in_features, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(TOKENS)[None, :, None] * torch.ones(16)
    seen_11TT = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    if hidden is not None:
        seen_11TT[..., hidden] = False
    mask = indexer(x_1TD, (angles.cos(), angles.sin()), seen_11TT, None)
    found: list[int] = mask[0, 0, -1].nonzero().flatten().tolist()
    return found


def test_an_evicted_token_moves_every_later_block() -> None:
    model = _model()
    indexer = next(module for name, module in model.named_modules() if name.endswith(".indexer"))
    block = indexer.compress_ratio
    whole, without_first = _chosen(indexer, None), _chosen(indexer, 0)
    assert len(whole) < TOKENS  # some are left out: the index decides
    for tokens, first in ((whole, 0), (without_first, 1)):
        blocks = {(token - first) // block for token in tokens if (token - first) // block < (TOKENS - first) // block}
        assert {first + block * b + i for b in blocks for i in range(block)} <= set(
            tokens
        )  # whole blocks, counted from the first
    # A token that nothing attended to is not free to go either: without it other tokens than before are read.
    unread = next(token for token in range(TOKENS) if token not in whole)
    assert _chosen(indexer, unread) != whole


def test_the_refusal_says_so() -> None:
    with pytest.raises(UserError, match="every later one falls into another block") as refused:
        shape_of(_model().config)
    assert "\n" not in str(refused.value)
