"""What is done to rows that all stay: cache positions, decoded copies and rotations act where nothing is evicted or lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, PretrainedConfig, SmolLM3Config

from harness.engine.engine import Engine
from harness.engine.requests import Question, Result
from harness.engine.streams import Reading, context_cache, read
from harness.stages.budget import Amount
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.keep import Keep
from harness.stages.protocols import LayerView, Needs, Scorer
from harness.stages.score.expected_attention import ExpectedAttention
from harness.stages.score.snapkv import SnapKV
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.asking import results
from tests.support.recording import recording
from tests.support.tiny_models import FAMILIES, SHAPE, build, ids

ROTARY = [family for family in FAMILIES if family != "gpt2"]


def serve(engine: Engine, *stacks: Stack, n: int = 90) -> list[Result[Any]]:
    jobs = [Question(owner=None, prefix=tuple(ids(n)), stack=stack, held=(3, 4), max_new=6) for stack in stacks]
    return sorted(results(engine, jobs), key=lambda one: stacks.index(one.request.stack))


# --- nothing evicted, nothing lost -------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "always"])
@pytest.mark.parametrize("family", ROTARY)
def test_cache_positions_without_eviction_are_the_full_cache(family: str, phase: str) -> None:
    """A short cut for stacks that compress nothing left keys rotated that are then rotated again when they are read."""
    engine = tiny_models.engine(family)
    prefix = engine.prefill(ids(90))
    rows = [engine.compress(prefix, stack) for stack in (Stack(), Stack(positions="cache", phase=phase))]
    for n in (5, 1, 1):
        rows, logits = engine.feed(rows, [ids(n, seed=n)] * 2)
        torch.testing.assert_close(logits[1], logits[0], atol=2e-5, rtol=2e-5)
    for part, exact in zip(rows[1].head_groups, rows[0].head_groups, strict=True):
        assert not torch.equal(part.keys.read(torch.float32), exact.keys.read(torch.float32)), "stored without rotation"


@pytest.mark.parametrize("stack", [Stack(positions="cache"), Stack(read="cached"), Stack(positions="cache", read="cached")])
def test_only_the_full_cache_is_called_full_and_shares_the_prefix(stack: Stack) -> None:
    engine = tiny_models.engine("llama")
    full, other = serve(engine, Stack(), stack)
    assert full.answer and other.answer and other.answer.ids == full.answer.ids
    assert (full.request.stack.describe(), full.request.stack.compresses) == ("full", False)
    assert stack.describe() != "full" and stack.compresses
    assert other.row and other.row.touched() == 0
    assert other.peak_prefill == full.peak_prefill + other.context.total
    scratch = full.context.total if stack.read == "cached" else 0
    assert other.context.total == full.context.total + scratch


def test_labels_say_where_rows_stand_how_they_are_read_and_when_they_go() -> None:
    keep = conf_tree.keep("streaming", 24)
    stacks = [Stack(), Stack(positions="cache"), Stack(read="cached"), Stack(keys=Int8()), Stack(keys=Int8(), read="cached")]
    stacks += [Stack(keep=keep, phase=phase) for phase in ("prefill", "chunked", "always", "every_n")]
    stacks += [Stack(keep=keep, phase="chunked", chunk=32), Stack(keep=keep, phase="every_n", every=4)]
    stacks += [Stack(keep=keep, phase="always", positions="cache"), Stack(keep=keep, phase="always", read="cached")]
    labels = [stack.describe() for stack in stacks]
    assert len(set(labels)) == len(labels), labels


# --- decoded copies ----------------------------------------------------------------------------------------------


CACHED: dict[str, dict[str, Any]] = {
    "int8": {"keys": Int8(), "values": Int8()},
    "int4": {"keys": IntGroups(residual=8), "values": IntGroups(residual=8)},
    "exact": {},
    "h2o_int8": {"keep": conf_tree.keep("h2o", 40), "keys": Int8(), "values": Int8(), "phase": "always"},
    "knorm_int8": {"keep": conf_tree.keep("knorm", 40), "keys": Int8(), "values": Int8(), "phase": "always"},
    "streaming_int8": {"keep": conf_tree.keep("streaming", 40), "keys": Int8(), "phase": "always", "positions": "cache"},
    "chunked": {"keep": conf_tree.keep("keydiff", 40), "keys": Int8(), "values": Int8(), "phase": "chunked", "chunk": 24},
}


@pytest.mark.parametrize(("compute", "kv"), [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("name", CACHED)
@torch.inference_mode()
def test_a_decoded_copy_changes_no_bit_and_has_the_dtype_of_attention(name: str, compute: str, kv: str) -> None:
    """In streams without and with a context, contexts in chunks, and answers; it was in the cache dtype in the first two."""
    dtype, kv_dtype = getattr(torch, compute), getattr(torch, kv)
    engine = Engine(build(tiny_models.config("llama"), "kv_harness", dtype), kv_dtype)
    every, cached = (Stack(**CACHED[name], read=how) for how in ("every_step", "cached"))
    tokens = tuple(ids(150))
    starts = [[engine.start(s, 150) for s in (every, cached)]]
    starts += [[context_cache(engine, engine.prefill(tokens[:90], s.needs), tokens[:90], s, 0)[0] for s in (every, cached)]]
    for start in starts[1:] if every.chunked else starts:
        a, b = (read(engine, [Reading(ids=tokens, row=row, reference=0)], 16)[0] for row in start)
        assert (a.curve("nll") == b.curve("nll")).all()
        kept = zip(a.row.kept_positions(), b.row.kept_positions(), strict=True)
        assert all(torch.equal(x, y) for one, other in kept for x, y in zip(one, other, strict=True))
        views = [side.decoded_HND for part in b.row.head_groups for side in (part.keys, part.values)]
        assert all(view is not None and view.dtype == dtype for view in views)
        n_encoded = sum(s.n_encoded * p.heads.n for p in b.row.head_groups for s in (p.keys, p.values))
        assert b.row.bytes().logical["scratch"] == n_encoded * 32 * dtype.itemsize
        assert b.row.bytes().total == a.row.bytes().total + b.row.bytes().allocated["scratch"]


# --- rotation of some layers -------------------------------------------------------------------------------------


def nope(layers: int = 4) -> PretrainedConfig:
    """SmolLM3's pattern: every other layer rotates nothing."""
    sizes = SHAPE | {"num_hidden_layers": layers, "num_key_value_heads": 2}
    return SmolLM3Config(**sizes, no_rope_layers=[1, 0] * (layers // 2), use_sliding_window=False, layer_types=None)


@dataclass(frozen=True)
class Rotations(Scorer):
    """Writes down which layers are shown with a rotation."""

    found: dict[int, bool]

    def score(self, view: LayerView) -> Tensor:
        self.found[view.layer] = view.rope is not None
        return view.pos_HN.float()


def test_every_layer_has_its_own_rotation_or_none() -> None:
    engine, found = Engine(build(nope(), "kv_harness"), torch.float32), {}
    assert [rope is not None for rope in engine.ropes] == [True, False, True, False]
    keep = Keep(scorer=Rotations(found), budget=Amount(unit="tokens", value=20), recent=0)
    engine.compress(engine.prefill(ids(60)), Stack(keep=keep))
    assert found == {0: True, 1: False, 2: True, 3: False}


def test_expected_attention_turns_the_queries_of_layers_that_rotate_and_of_no_others() -> None:
    """Against the definition from recorded queries and keys, in float64, layer by layer."""
    engine, scorer = Engine(build(nope(), "kv_harness"), torch.float32), ExpectedAttention(future=64)
    stack = Stack(keep=Keep(scorer=scorer, budget=Amount(unit="tokens", value=20)))
    values: dict[int, list[Tensor]] = {}
    with recording(engine.shape.full_layers, values) as recorded:
        prefix = engine.prefill(ids(60), stack.needs)
    row = engine.compress(prefix, stack)
    swapped = 0
    for layer, rope in enumerate(engine.ropes):
        ((q, k),), (v,) = recorded[layer], values[layer]
        plain = (q if rope is None else rope.unrotate(q, torch.arange(60))).double()
        mean, centred = plain.mean(1), plain - plain.mean(1, keepdim=True)
        cov, turn = centred.mT @ centred / 60, torch.eye(32, dtype=torch.float64)
        if rope is not None:
            basis = torch.eye(32)[:, None].expand(32, 64, 32)
            turn = rope.rotate(basis, torch.arange(60, 124)).double().mean(1).mT
        keys, scale = k.double().repeat_interleave(2, 0), 32**-0.5
        mean, cov = mean @ turn.mT, turn @ cov @ turn.mT
        logits = scale * torch.einsum("qd,qnd->qn", mean, keys) + scale**2 / 2 * ((keys @ cov) * keys).sum(-1)
        scores = logits.softmax(-1).unflatten(0, (2, 2)).mean(1) * v.double().norm(dim=-1)
        for head, positions in enumerate(row.kept_positions()[layer]):
            wanted = scores[head].topk(20).indices.sort().values
            swapped += len(set(positions.tolist()) - set(wanted.tolist()))
    assert swapped <= 1  # by rounding


def test_every_layer_has_its_own_scale() -> None:
    """GPT-2 with scores divided by the layer's number: several layers scored in one go would all take the first one's."""

    class One(SnapKV):  # a scorer that is not marked as joint gets one layer at a time
        pass

    sizes = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}
    config = GPT2Config(vocab_size=tiny_models.VOCABULARY, scale_attn_by_inverse_layer_idx=True, **sizes)
    engine = Engine(build(config, "kv_harness"), torch.float32)
    prefix = engine.prefill(ids(90), Needs(queries=8))
    assert len({stats.scaling for stats in prefix.stats}) == 3
    budget = Amount(unit="tokens", value=30)
    rows = [engine.compress(prefix, Stack(keep=Keep(scorer=kind(window=8), budget=budget))) for kind in (SnapKV, One)]
    kept = zip(*(row.kept_positions() for row in rows), strict=True)
    assert all(torch.equal(x, y) for one, other in kept for x, y in zip(one, other, strict=True))


# --- a budget for the whole context ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [{"value": 1.0}, {"value": 0.97}, {"unit": "bytes", "value": 1 << 20}])
@pytest.mark.parametrize(
    ("name", "phase"), [("snapkv", "prefill"), ("snapkv", "chunked"), ("chunkkv", "prefill"), ("window", "prefill")]
)
def test_a_budget_that_holds_the_whole_context_keeps_it(name: str, phase: str, value: dict[str, Any]) -> None:
    """21 tokens are fewer than the 32 that the scorer protects: nothing is evicted, which is no reason to refuse."""
    engine, keep = tiny_models.engine("llama"), conf_tree.keep(name, 100)
    keep = Keep(scorer=keep.scorer, budget=Amount(**value), recent=32, layers=keep.layers)
    full, one = serve(engine, Stack(), Stack(keep=keep, phase=phase), n=21)
    assert (one.status, one.error) == ("ok", None)
    assert full.answer and one.answer and one.answer.ids == full.answer.ids
    assert one.row and one.row.touched() == 0 and one.context.total == full.context.total


def test_it_is_refused_where_rows_go_later_or_the_context_is_longer() -> None:
    engine, keep = (
        tiny_models.engine("llama"),
        Keep(scorer=conf_tree.keep("h2o", 8).scorer, budget=Amount(value=1.0), recent=32),
    )
    (always,) = serve(engine, Stack(keep=keep, phase="always"), n=21)
    assert always.status == "refused" and "recent 32 need at least 32" in str(always.error)
    short = Keep(scorer=conf_tree.keep("snapkv", 32).scorer, budget=Amount(value=0.9))
    (less,) = serve(engine, Stack(keep=short), n=21)
    assert less.status == "refused"
