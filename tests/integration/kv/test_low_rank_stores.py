"""Low rank and xKV in caches of tiny models: identities at full rank, bases against slow ones, bytes, eviction, latents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.calibrate.low_rank_bases import of_text, of_weights
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.memory import predict
from harness.kv.sequence_cache import SequenceCache
from harness.kv.storing import whole_sets
from harness.planning.sizes import size
from harness.stages.bases import Bases, Span, principal
from harness.stages.codec.int8 import Int8
from harness.stages.codec.low_rank import LowRank
from harness.stages.codec.xkv import XKV
from harness.stages.rank import Rank
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.oracles import low_rank as oracle
from tests.support.tiny_models import ids

CONTEXT = 50
TEXT = [ids(80, seed=8), ids(70, seed=9)]


def found(engine: Engine, span: Span, role: str, *, unrotated: bool) -> Bases:
    """Bases of a text or of weights, without the user cache."""
    rows = of_text(engine, TEXT, span, role, unrotated=unrotated)
    if span.of == "weights":
        rows = of_weights(engine, span, role, unrotated=unrotated)
    both = {int(name.split(".")[1]): principal(moment) for name, moment in rows.items()}
    return Bases({i: one[0] for i, one in both.items()}, {}, {i: one[1] for i, one in both.items()})


def low_rank(
    engine: Engine, value: float, *, rope: str = "pre", heads: int | None = None, of: str = "text", **more: Any
) -> Stack:
    """Keys and values in bases of the engine's model."""
    codecs = {}
    for role in ("keys", "values"):
        codec = LowRank(rank=Rank(value=value), heads=heads, of="weights", **more)
        unrotated = rope == "pre" and role == "keys"
        codecs[role] = codec.calibrated(found(engine, Span(heads, of), role, unrotated=unrotated))
    return Stack(**codecs, rope=rope)


def xkv(value: float, layers: int, **more: Any) -> Stack:
    codec = XKV(rank=Rank(value=value), layers=layers, **more)
    return Stack(keys=codec, values=codec, rope="pre")


def fed(engine: Engine, stacks: list[Stack]) -> tuple[list[SequenceCache], list[Tensor]]:
    """Caches of one context after some tokens more, and the logits of these."""
    prefix = engine.prefill(ids(CONTEXT))
    rows, logits = [engine.compress(prefix, stack) for stack in stacks], []
    for n in (5, 1, 1):
        rows, one = engine.feed(rows, [ids(n, seed=n)] * len(rows))
        logits.append(one)
    return rows, logits


# --- identities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_at_full_rank_it_is_the_full_cache(family: str) -> None:
    engine = tiny_models.engine(family)
    stacks = [Stack(), low_rank(engine, 1.0), low_rank(engine, 1.0, heads=1, rope="post"), xkv(1.0, 3)]
    for logits in fed(engine, stacks)[1]:
        for one in logits[1:]:
            torch.testing.assert_close(one, logits[0], atol=1e-5, rtol=1e-5)


def test_gqa_as_latents_of_full_rank_is_the_same_model() -> None:
    """One latent of keys and one of values for all heads, as wide as all heads: what MLA stores, before anything is cut."""
    engine = tiny_models.engine("llama", kv_heads=4)
    rows, logits = fed(engine, [Stack(), low_rank(engine, 1.0, of="weights")])
    for one in logits:
        torch.testing.assert_close(one[1], one[0], atol=1e-5, rtol=1e-5)
    kinds = rows[1].bytes().logical
    assert kinds["payload"] == rows[0].bytes().logical["payload"]
    assert kinds["metadata"] == 3 * 2 * (4 * 32) ** 2 * 4


# --- oracles -----------------------------------------------------------------------------------------------------


def test_bases_are_singular_vectors_of_the_text() -> None:
    engine = tiny_models.engine("llama")
    stack = low_rank(engine, 0.25)
    prefixes = [engine.prefill(text).row for text in TEXT]
    for layer in range(3):
        ropes = engine.ropes[layer]
        assert ropes is not None
        whole = []
        for row in prefixes:
            k = row.slots[layer][0].head_group.keys.exact()[row.slots[layer][0].at]
            whole.append(ropes.unrotate(k, torch.arange(k.shape[1])).double().transpose(0, 1).flatten(1))
        vectors = torch.linalg.svd(torch.cat(whole), full_matrices=False).Vh[:16]
        assert isinstance(stack.keys, LowRank)
        assert stack.keys.bases is not None
        mine = stack.keys.bases.by_layer[layer][0, :, :16].double()
        torch.testing.assert_close(mine @ mine.T, vectors.T @ vectors, atol=1e-5, rtol=1e-5)


def test_xkv_stores_the_prompts_own_decomposition() -> None:
    engine = tiny_models.engine("llama")
    prefix = engine.prefill(ids(CONTEXT)).row
    row = engine.compress(engine.prefill(ids(CONTEXT)), xkv(0.25, 3))

    def sides(one: SequenceCache) -> list[Tensor]:
        slots = [one.slots[layer][0] for layer in range(3)]
        return [slot.head_group.values.read(torch.float32, slot.at).transpose(0, 1).flatten(1) for slot in slots]

    for got, want in zip(sides(row), oracle.xkv(sides(prefix), 3 * 2 * 8), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


def test_projections_must_make_the_keys_alone() -> None:
    for family, said in (("phi3", "no k_proj makes its keys"), ("qwen3", "normed behind k_proj"), ("gpt2", "no k_proj")):
        with pytest.raises(UserError, match=said):
            of_weights(tiny_models.engine(family), Span(None, "weights"), "keys", unrotated=True)
    with pytest.raises(UserError, match=r"legal are compress\.rope=pre"):
        of_weights(tiny_models.engine("llama"), Span(None, "weights"), "keys", unrotated=False)


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 7])
def test_bytes_are_the_formula_and_the_plan(late: int) -> None:
    engine = tiny_models.engine("llama")
    stacks = [low_rank(engine, 0.5), low_rank(engine, 0.5, heads=1, sinks=4, recent=8), xkv(0.5, 3), xkv(0.5, 1, inner=Int8())]
    stacks.append(replace(xkv(0.5, 3), keep=conf_tree.keep("streaming", 24)))
    for stack in stacks:
        row = engine.compress(engine.prefill(ids(CONTEXT)), stack)
        for n in range(late):
            (row,), _ = engine.feed([row], [[n + 3]])
        held = row.held()[0][0]
        assert row.bytes().total == predict(stack, engine.shape, held, 4, CONTEXT + late, late)
        assert row.bytes().total == size(stack, engine.shape, CONTEXT, 4, late).high


def test_layers_that_lie_apart_are_brought_together() -> None:
    engine = tiny_models.engine("llama")
    row = engine.prefill(ids(CONTEXT)).row
    apart = [row.head_groups[0].rest((layer,)) for layer in range(3)]
    stack = xkv(0.5, 3)
    assert whole_sets(row.head_groups, stack, engine.shape) == list(row.head_groups)
    (joined,) = whole_sets(apart, stack, engine.shape)
    assert joined.heads == row.head_groups[0].heads
    assert torch.equal(joined.keys.exact(), row.head_groups[0].keys.exact())
    assert torch.equal(joined.values.exact(), row.head_groups[0].values.exact())


# --- with other stages -------------------------------------------------------------------------------------------


def test_heads_with_bases_of_their_own_are_evicted_in_every_phase() -> None:
    engine = tiny_models.engine("llama")
    codecs = low_rank(engine, 0.5, heads=1)
    stacks = [replace(codecs, keep=conf_tree.keep("h2o", 24), phase=phase) for phase in ("prefill", "always")]
    stacks.append(replace(codecs, keep=conf_tree.keep("adakv", 40)))
    prefix = engine.prefill(ids(CONTEXT), stacks[0].needs | stacks[2].needs)
    for stack in stacks:
        row = engine.compress(prefix, stack)
        for n in (5, 1):
            (row,), logits = engine.feed([row], [ids(n, seed=n)])
            assert bool(torch.isfinite(logits).all())
        exact = {heads for layer in row.held() for heads in layer}
        assert len(exact) > 1 or row.bytes().total == predict(stack, engine.shape, exact.pop(), 4, row.seen)


def test_a_model_whose_layers_do_not_fall_into_groups_is_refused() -> None:
    engine = tiny_models.engine("llama")
    with pytest.raises(UserError, match=r"codec.layers=2 .* legal are 1, 3"):
        engine.compress(engine.prefill(ids(CONTEXT)), xkv(0.5, 2))
