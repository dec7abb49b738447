"""Keys with a large bias (Qwen2.5's habit): one scale for a token's channels breaks them, one scale a channel does not."""

from __future__ import annotations

from functools import lru_cache

import torch

from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.stages.codec.int_groups import IntGroups
from harness.stages.stack import Stack
from tests.support.tiny_models import build, config, ids

CONTEXT, QUESTION = ids(256), ids(32, seed=1)
BIAS = 100.0


@lru_cache
def engine(biased: bool) -> Engine:
    """The tiny Qwen2 model with attention that looks somewhere; `biased` plants a large bias in one key channel of a head.

    The channel is the slowest to rotate, so all scores move nearly alike and the model itself hardly changes.
    """
    model = build(config("qwen2"), NAME)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 4
        layer.self_attn.k_proj.weight.data *= 4
        if biased:
            layer.self_attn.k_proj.bias.data.view(2, 32)[:, 15] += BIAS
    return Engine(model, torch.float32)


def compared(biased: bool, axis: str, bits: int) -> tuple[float, float]:
    """(KL of the next-token distribution from the full cache's in nats, top-1 agreement), means over the question."""
    run = engine(biased)
    prefix = run.prefill(CONTEXT)
    stack = Stack(keys=IntGroups(bits=bits, axis=axis, residual=0))
    rows = [run.compress(prefix, Stack()), run.compress(prefix, stack)]
    exact, got = run.read(rows, [QUESTION, QUESTION]).logits_BLV.log_softmax(-1)
    agree = (exact.argmax(-1) == got.argmax(-1)).float().mean()
    return float((exact.exp() * (exact - got)).sum(-1).mean()), float(agree)


def test_a_key_bias_breaks_four_bit_keys_per_token_and_not_per_channel() -> None:
    (calm, _), (kl, agree) = compared(False, "channel", 4), compared(True, "channel", 4)
    assert kl < 1.5 * calm  # the bias is the minimum of its channel: no code is spent on it
    assert agree > 0.6
    (calm, _), (broken, agree) = compared(False, "token", 4), compared(True, "token", 4)
    assert broken > 5 * calm
    assert broken > 10 * kl
    assert agree < 0.3
