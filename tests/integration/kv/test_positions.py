"""Positions inside the cache: keys are stored without rotation and stand where StreamingLLM puts them; original ones beside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.rope import ropes_of
from harness.stages.codec.int8 import Int8
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.recording import recording
from tests.support.tiny_models import FAMILIES, build, ids, tiny_a

ROTARY = [family for family in FAMILIES if family != "gpt2"]


def one_layer() -> Engine:
    return Engine(build(tiny_a(num_hidden_layers=1), "kv_harness"), torch.float32)


def fresh(engine: Engine, tokens: list[int]) -> Tensor:
    """Last logits of a full run over these tokens alone."""
    _, logits = engine.feed([engine.start()], [tokens])
    return logits


@pytest.mark.parametrize("phase", ["prefill", "always", "chunked"])
@pytest.mark.parametrize(("positions", "sinks"), [("original", 0), ("cache", 0), ("cache", 4)])
def test_case_15_decoding_after_eviction_equals_a_fresh_run_on_what_was_kept(phase: str, positions: str, sinks: int) -> None:
    """One layer: a key depends on its own token only, so a query sees kept tokens as a run over just these tokens would.

    Without sinks the kept tokens are a suffix, and only distances matter; with sinks the two parts have closed ranks in the cache.
    """
    engine, tokens, keep = one_layer(), ids(300), 128
    stack = Stack(keep=conf_tree.keep("streaming" if sinks else "window", keep), phase=phase, positions=positions)
    if phase == "chunked":
        ((row, _),) = engine.read_chunked(tokens, [engine.start(stack, 300)])
    else:
        row = engine.compress(engine.prefill(tokens), stack)
    kept = tokens[:sinks] + tokens[300 - keep + sinks :]
    new: list[int] = []
    for token in ids(3, seed=9):
        (row,), logits = engine.feed([row], [[token]])
        new.append(token)
        if phase == "always" and len(new) > 1:  # the store keeps its size: what was fed before has pushed out an older token
            kept = [*kept[:sinks], *kept[sinks + 1 :]]
        torch.testing.assert_close(logits, fresh(engine, kept + new), atol=2e-5, rtol=1e-5)
    assert row.seen == 303


def in_both_modes(engine: Engine) -> list[Tensor]:
    """Last logits of one text at original positions and at cache positions, nothing evicted."""
    logits = []
    for positions in ("original", "cache"):
        stack = Stack(keep=conf_tree.keep("streaming", 200), phase="always", positions=positions)
        row = engine.compress(engine.prefill(ids(60)), stack)
        for n in (5, 1, 1):
            (row,), last = engine.feed([row], [ids(n, seed=n)])
        logits.append(last)
    return logits


@pytest.mark.parametrize("family", ROTARY)
def test_without_eviction_both_modes_agree(family: str) -> None:
    torch.testing.assert_close(*in_both_modes(tiny_models.engine(family)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ROTARY)
def test_turned_back_keys_are_those_before_the_rotation(family: str) -> None:
    """Rotating what was rotated back gives the model's own keys; at position 0 nothing is rotated."""
    engine = tiny_models.engine(family)
    with recording(tuple(range(len(engine.shape.layers)))) as recorded:
        engine.prefill(ids(50))
    positions = torch.arange(50)
    for layer, rope in enumerate(engine.ropes):
        assert rope is not None
        ((_, k),) = recorded[layer]
        plain = rope.unrotate(k, positions)
        torch.testing.assert_close(rope.rotate(plain, positions), k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rope.range(plain[:, 7:], 7), k[:, 7:], atol=1e-5, rtol=1e-5)
        assert torch.equal(plain[:, 0], k[:, 0])
        assert float((plain[:, 9] - k[:, 9]).abs().max()) > 1e-2
        own = positions.flip(0).expand(k.shape[0], -1)  # every head with positions of its own
        torch.testing.assert_close(rope.unrotate(rope.rotate(k, own), own), k, atol=1e-5, rtol=1e-5)


def test_an_attention_scaling_inside_the_embedding_is_undone() -> None:
    config = LlamaConfig(
        **(tiny_models.SHAPE | {"num_key_value_heads": 2}),
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 256},
    )
    (rope, *_), moves = ropes_of(build(config, "kv_harness"), 3)
    assert not moves
    assert rope is not None
    x, positions = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    assert float((rope.rotate(x, positions).norm() / x.norm() - 1).abs()) > 0.05  # the scaling is there
    torch.testing.assert_close(rope.unrotate(rope.rotate(x, positions), positions), x, atol=1e-5, rtol=1e-5)


def test_quantized_keys_are_quantized_without_rotation() -> None:
    engine = one_layer()
    stack = Stack(keep=conf_tree.keep("streaming", 64), phase="always", positions="cache", keys=Int8(), values=Int8())
    row = engine.compress(engine.prefill(ids(200)), stack)
    with recording((0,)) as recorded:
        engine.prefill(ids(200))
    rope, ((_, k),) = engine.ropes[0], recorded[0]
    assert rope is not None
    plain = rope.unrotate(k, torch.arange(200))[:, [0, 1, 2, 3, *range(140, 200)]]
    codec, out = Int8(), torch.empty(2, 64, 64)
    codec.decode(codec.encode(plain), out)
    torch.testing.assert_close(row.head_groups[0].keys.read(torch.float32), out, atol=1e-4, rtol=1e-4)


def test_models_and_stacks_without_one_place_in_the_cache_are_refused() -> None:
    stack = Stack(keep=conf_tree.keep("streaming", 8), positions="cache")
    with pytest.raises(UserError, match=r"compress\.positions='cache' .* 'gpt2'.*legal is positions=original"):
        tiny_models.engine("gpt2").start(stack, 20)

    class Uneven:
        def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
            return [tokens] * len(scores_HM)

    with pytest.raises(UserError, match=r"compress\.positions='cache' needs heads and layers that hold equally many tokens"):
        Stack(keep=conf_tree.keep("streaming", 8, heads=Uneven()), positions="cache")
