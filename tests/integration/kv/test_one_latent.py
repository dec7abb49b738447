"""One latent a layer beside a rotated part of its keys (TransMLA): identities, a slow oracle, bytes, and what it goes with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.calibrate.share_tables import latents, partners
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.memory import predict
from harness.kv.sequence_cache import SequenceCache
from harness.stages.share.one_latent import OneLatent
from harness.stages.share.sharing import Measured
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.decoupled_reference import NAME, DecoupledCache, Fitted
from tests.support.tiny_models import ids, tiny

CONTEXT = 60
TEXT = [ids(150, 7), ids(90, 8)]
TOLERANCE = 1e-5  # times max(1, largest absolute logit)


def one_latent(engine: Engine, **settings: Any) -> OneLatent:
    share: OneLatent = replace(conf_tree.member("share", "one_latent"), **settings)
    return share.fitted(Measured(latents(engine, TEXT, share), {}))


def compressed(engine: Engine, share: OneLatent, **more: Any) -> SequenceCache:
    return engine.compress(engine.prefill(ids(CONTEXT)), Stack(share=share, **more))


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("family", "heads"), [("llama", 4), ("qwen2", 2), ("qwen3", 2), ("phi3", 1), ("gemma3", 2)])
def test_with_all_heads_rotated_and_all_numbers_it_is_the_full_cache(family: str, heads: int) -> None:
    engine = tiny_models.engine(family, heads)
    row, full = compressed(engine, one_latent(engine, rope_heads=None, fraction=1.0)), engine.prefill(ids(CONTEXT)).row
    for step in range(4):
        tokens = ids(6 if step == 0 else 1, seed=step)
        (row,), logits = engine.feed([row], [tokens])
        (full,), expected = engine.feed([full], [tokens])
        assert near(logits, expected)


@pytest.mark.parametrize(("rope_heads", "fraction"), [(1, 0.3), (1, 0.5), (2, 0.6), (None, 0.75)])
def test_it_reads_what_the_oracle_leaves(rope_heads: int | None, fraction: float) -> None:
    engine, model = tiny_models.engine("llama", 4), tiny("llama", NAME, 4)
    share = one_latent(engine, rope_heads=rope_heads, fraction=fraction)
    most = 4 if rope_heads is None else rope_heads
    fitted = []
    for layer, rope in enumerate(engine.ropes):
        assert rope is not None
        rows = []
        for window in TEXT:
            ((part, at),) = engine.prefill(window).row.slots[layer]
            k = rope.unrotate(part.keys.exact()[at], torch.arange(len(window)))
            rows.append((k, part.values.exact()[at]))
        k, v = (torch.cat(side, 1) for side in zip(*rows, strict=True))
        fitted.append(Fitted.on(k, v, most, round(fraction * 256) - most * 32))
    reference, row = DecoupledCache(model, fitted), compressed(engine, share)
    reference.feed(ids(CONTEXT))
    for step in range(3):
        tokens = ids(5 if step == 0 else 1, seed=step)
        expected = reference.feed(tokens)
        (row,), logits = engine.feed([row], [tokens])
        assert near(logits[0], expected)


def test_with_all_numbers_nothing_is_lost_but_rotation_and_that_matters() -> None:
    """As many numbers as the full cache has, whatever the text held; and other logits, as the rest of the keys has no positions."""
    engine = tiny_models.engine("llama", 4)
    row, full = compressed(engine, one_latent(engine, fraction=1.0)), engine.prefill(ids(CONTEXT)).row
    for layer, rope in enumerate(engine.ropes):
        ((slot,), ((exact, at),)) = row.slots[layer], full.slots[layer]
        keys, values = torch.empty(4, CONTEXT, 64), torch.empty(4, CONTEXT, 32)
        slot.keys.write_to(keys, slot.at)
        slot.values.write_to(values, slot.at)
        assert torch.allclose(values, exact.values.exact()[at], atol=1e-5)
        assert rope is not None
        before = rope.unrotate(exact.keys.exact()[at], torch.arange(CONTEXT))
        assert torch.allclose(rope.unrotate(keys[..., :32], torch.arange(CONTEXT)) + keys[..., 32:], before, atol=1e-5)
    _, logits = engine.feed([row], [ids(5)])
    _, expected = engine.feed([engine.prefill(ids(CONTEXT)).row], [ids(5)])
    assert float((logits - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("keys", ["exact", "int8", "int4_token"])
def test_bytes_are_d_r_and_d_c_a_token_and_the_matrices_once(keys: str) -> None:
    engine = tiny_models.engine("llama", 4)
    share = one_latent(engine, fraction=0.5)
    stack = Stack(share=share, keys=conf_tree.member("codec", keys))
    row = engine.compress(engine.prefill(ids(CONTEXT)), stack)
    once = 3 * (4 * 32 * 1 + 4 * 64 * 96) * 4
    assert share.widths(4, 32, 32) == (32, 96)
    if keys == "exact":
        assert row.bytes().total == 3 * CONTEXT * (32 + 96) * 4 + once
    assert row.bytes().total == sum(row.bytes().allocated.values()) == predict(stack, engine.shape, CONTEXT, 4, CONTEXT)
    (row,), _ = engine.feed([row], [ids(5)])
    assert row.bytes().total == predict(stack, engine.shape, CONTEXT + 5, 4, CONTEXT + 5, 5)
    assert row.touched() == 3 * 4 * (CONTEXT + 5)


def test_together_as_alone_and_however_calls_are_chunked() -> None:
    engine = tiny_models.engine("llama", 4)
    stacks = [Stack(), Stack(share=one_latent(engine)), conf_tree.stack("mqa_pool"), conf_tree.stack("int8")]
    stacks.append(Stack(share=one_latent(engine, fraction=0.3), values=conf_tree.member("codec", "int8")))
    rows = [engine.compress(engine.prefill(ids(CONTEXT)), stack) for stack in stacks]
    grown, together = engine.feed(rows, [ids(4, seed=1)] * len(rows))
    for row, logits in zip(rows, together, strict=True):
        assert float((engine.feed([row], [ids(4, seed=1)])[1][0] - logits).abs().max()) <= 1e-5
    row, stack = engine.start(stacks[1]), stacks[1]
    for at in range(0, CONTEXT, 13):
        (row,), _ = engine.feed([row], [ids(CONTEXT)[at : at + 13]])
    whole = engine.start(stack)
    (whole,), _ = engine.feed([whole], [ids(CONTEXT)[:13]])
    part = engine.start(stack)
    for token in ids(CONTEXT)[:13]:
        (part,), _ = engine.feed([part], [[token]])
    assert row.bytes().allocated == rows[1].bytes().allocated and whole.bytes().allocated == part.bytes().allocated
    assert grown[1].seen == CONTEXT + 4


def test_channels_that_turn_together_are_found_for_every_convention() -> None:
    for family, d in (("llama", 32), ("phi3", 32)):
        rope = tiny_models.engine(family).ropes[0]
        assert rope is not None
        found = partners(rope, d, torch.device("cpu"))
        assert found == [(i + d // 2) % d for i in range(d)]
        turned = [i for i, j in enumerate(partners(rope, d + 8, torch.device("cpu"))) if i == j]
        assert turned == list(range(d, d + 8)), "channels beyond those that are turned stand alone"


REFUSED = {
    r"with a keep is not possible": {"keep": conf_tree.keep("h2o", 16)},
    r"rope='pre' is not possible": {"rope": "pre"},
    r"compares queries with keys": {"keys": conf_tree.member("codec", "think")},
    r"constants are calibrated": {"keys": conf_tree.member("codec", "int8_static")},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_does_not_go_with_is_refused_in_one_line(why: str) -> None:
    with pytest.raises(UserError, match=rf"compress\.share=OneLatent .*{why}.* legal (is|are) "):
        Stack(share=conf_tree.member("share", "one_latent"), **REFUSED[why])


def test_sizes_and_models_that_cannot_be_are_refused_in_one_line() -> None:
    share = conf_tree.member("share", "one_latent", "rope_heads=5")
    engine = tiny_models.engine("llama", 4)
    with pytest.raises(UserError, match=r"share\.rope_heads=5 is not possible for 4 KV heads: allowed are 1 to 4, or null"):
        engine.check(Stack(share=share))
    with pytest.raises(UserError, match=r"share\.fraction=0\.1 is not possible for 4 KV heads .* it must exceed 0\.125"):
        engine.check(Stack(share=conf_tree.member("share", "one_latent", "fraction=0.1")))
    with pytest.raises(UserError, match="no rotary positions that can be rotated back"):
        tiny_models.engine("gpt2").check(Stack(share=conf_tree.member("share", "one_latent")))
    for settings in ({"fraction": 0}, {"fraction": 1.5}, {"rope_heads": 0}, {"calibration": None}):
        with pytest.raises(UserError, match=rf"share\.{next(iter(settings))}=.* is not possible: "):
            replace(share, **settings)
