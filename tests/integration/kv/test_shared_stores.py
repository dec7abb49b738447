"""Shared heads, shared layers and merged pairs equal a full cache whose rows were changed by slow oracles; bytes; identities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.attention import NAME
from harness.kv.memory import predict
from harness.kv.sequence_cache import SequenceCache
from harness.kv.shared.pair_store import PairStore
from harness.stages.codec.exact import Exact
from harness.stages.encoded import Heads
from harness.stages.protocols import LayerView, Needs, Scorer
from harness.stages.share.adjacent_layers import AdjacentLayers
from harness.stages.share.aligned_heads import AlignedHeads
from harness.stages.share.minicache import MiniCache
from harness.stages.share.pooled_heads import PooledHeads
from harness.stages.share.sharing import Measured, Share
from harness.stages.share.upper_layers import UpperLayers
from harness.stages.stack import Stack
from tests.support import conf_tree, share_oracles, tiny_models
from tests.support.changed_reference import Changed
from tests.support.masked_reference import NAME as REFERENCE
from tests.support.masked_reference import MaskedCache
from tests.support.repeated_heads import with_repeated_heads
from tests.support.tiny_models import build, config, ids, tiny, tiny_a

CONTEXT = 90
TOLERANCE = 1e-5  # times max(1, largest absolute logit)
EVERYTHING = conf_tree.everything()

SHARES: dict[str, tuple[Share, Callable[[int], share_oracles.Rule]]] = {
    "pooled": (PooledHeads(), lambda heads: share_oracles.pooled(max(1, heads // 2))),
    "one head": (PooledHeads(groups=1), lambda heads: share_oracles.pooled(1)),
    "cla": (AdjacentLayers(), lambda heads: share_oracles.read_from({1: 0})),
    "yoco": (UpperLayers(), lambda heads: share_oracles.read_from({2: 1})),
    "minicache": (MiniCache(start=0.3), lambda heads: share_oracles.minicache([(0, 1)], 0.6, 0.05)),
}


def worst(engine: Engine, stack: Stack, reference: MaskedCache, context: int = CONTEXT) -> float:
    """Largest difference to a reference over a question and four answer tokens."""
    row = engine.compress(engine.prefill(ids(context), EVERYTHING), stack, seed=3)
    reference.feed(ids(context), None)
    tokens, found = ids(7, seed=1), 0.0
    for _ in range(5):
        expected = reference.feed(tokens, row.kept_positions())
        (row,), logits = engine.feed([row], [tokens])
        found = max(found, float((logits[0] - expected).abs().max()) / max(1.0, float(expected.abs().max())))
        tokens = [int(expected.argmax())]
    return found


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 4), ("llama", 2), ("qwen3", 2), ("gpt2", 4)])
def test_layers_read_what_the_oracle_makes_of_exact_rows(name: str, family: str, kv_heads: int) -> None:
    share, rule = SHARES[name]
    model = tiny(family, REFERENCE, kv_heads)
    found = worst(tiny_models.engine(family, kv_heads), Stack(share=share), Changed(model, [None] * 3, rule(kv_heads)))
    assert found <= TOLERANCE


@pytest.mark.parametrize("name", SHARES)
def test_keys_before_rope_are_shared_alike(name: str) -> None:
    share, rule = SHARES[name]
    reference = Changed(tiny("llama", REFERENCE, 4), [None] * 3, rule(4))
    assert worst(tiny_models.engine("llama", 4), Stack(share=share, rope="pre"), reference) <= TOLERANCE


def test_channels_are_chosen_by_the_queries_of_all_heads_that_read_them() -> None:
    engine = tiny_models.engine("llama", 4)
    stack = Stack(share=PooledHeads(groups=2), keys=conf_tree.member("codec", "think"))
    row = engine.compress(engine.prefill(ids(CONTEXT), EVERYTHING), stack)
    assert row.bytes().total == predict(stack, engine.shape, CONTEXT, 4, CONTEXT)
    with pytest.raises(UserError, match="chooses by the queries of one layer"):
        Stack(share=MiniCache(), keys=conf_tree.member("codec", "think"))


@pytest.mark.parametrize("name", SHARES)
def test_the_rule_matters(name: str) -> None:
    found = worst(
        tiny_models.engine("llama", 4), Stack(share=SHARES[name][0]), MaskedCache(tiny("llama", REFERENCE, 4), [None] * 3)
    )
    assert found > 1e-3


@pytest.mark.parametrize("keep", ["h2o", "snapkv", "random", "vatp", "expected_attention", "adakv"])
@pytest.mark.parametrize("name", ["pooled", "cla", "yoco"])
def test_evicted_once_for_all_that_read_a_store(name: str, keep: str) -> None:
    share, rule = SHARES[name]
    engine = tiny_models.engine("llama", 4)
    for phase in ("prefill", "always"):
        rule_of_keep = conf_tree.keep(keep, 48)
        if phase not in rule_of_keep.scorer.phases or (phase == "always" and keep == "adakv"):
            continue
        stack = Stack(share=share, keep=rule_of_keep, phase=phase)
        found = worst(engine, stack, Changed(tiny("llama", REFERENCE, 4), [None] * 3, rule(4)))
        assert found <= TOLERANCE, phase
        kept = engine.compress(engine.prefill(ids(CONTEXT), EVERYTHING), stack).kept_positions()
        for one, other in ({"pooled": ((0, 0), (0, 1)), "cla": ((0, 2), (1, 2)), "yoco": ((1, 0), (2, 0))}[name],):
            assert torch.equal(kept[one[0]][one[1]], kept[other[0]][other[1]])


def test_windows_are_not_shared() -> None:
    engine = tiny_models.engine("gemma3")
    whole = engine.prefill(ids(CONTEXT))
    windows = [layer.window for layer in engine.shape.layers]
    reference = MaskedCache(tiny("gemma3", REFERENCE), windows)
    assert worst(engine, Stack(share=AdjacentLayers()), reference) <= TOLERANCE
    pooled = engine.compress(whole, Stack(share=PooledHeads()))
    only = engine.shape.layers[5]
    assert whole.row.bytes().total - pooled.bytes().total == CONTEXT * only.token_bytes(4) // 2


# --- identities ----------------------------------------------------------------------------------------------------


def same_as_full(engine: Engine, share: Share) -> SequenceCache:
    """The shared cache, whose logits are those of the full one, bit for bit."""
    whole = engine.prefill(ids(CONTEXT))
    row, full = engine.compress(whole, Stack(share=share)), whole.row
    first = row
    for step in range(3):
        tokens = ids(5 if step == 0 else 1, seed=step)
        (row,), logits = engine.feed([row], [tokens])
        (full,), expected = engine.feed([full], [tokens])
        assert torch.equal(logits, expected)
    return first


def test_as_many_groups_as_heads_change_no_bit() -> None:
    engine = tiny_models.engine("llama", 4)
    row = same_as_full(engine, PooledHeads(groups=4))
    assert row.touched() == 0
    assert row.bytes().total == engine.shape.full_bytes(CONTEXT, 4)


def test_pairs_that_keep_all_tokens_whole_change_no_bit_and_save_none() -> None:
    engine = tiny_models.engine("llama", 4)
    row = same_as_full(engine, MiniCache(retain=1.0, start=0.0))
    assert row.touched() == 0
    assert row.bytes().total > engine.shape.full_bytes(CONTEXT, 4)


def test_equal_owners_equal_the_full_cache_at_half_the_bytes() -> None:
    """Layers whose keys and values are the same biases, so that they are equal whatever the hidden states are."""
    model = build(config("qwen2"), NAME)
    for layer in model.model.layers:
        for one, other in ((layer.self_attn.k_proj, model.model.layers[0].self_attn.k_proj),
                           (layer.self_attn.v_proj, model.model.layers[0].self_attn.v_proj)):  # fmt: skip
            one.weight.data.zero_()
            one.bias.data.copy_(other.bias.data)
    engine = Engine(model, torch.float32)
    row = same_as_full(engine, UpperLayers(start=0.0))
    assert row.bytes().total * 3 == engine.shape.full_bytes(CONTEXT, 4)
    assert row.touched() == 2 * 2 * CONTEXT


@pytest.mark.parametrize("share", ["plain", "aligned"])
def test_an_mha_form_pooled_back_answers_as_the_model_at_its_bytes(share: str) -> None:
    model = build(tiny_a(), NAME)
    engine, repeated = Engine(model, torch.float32), Engine(with_repeated_heads(model, 2), torch.float32)
    pool = PooledHeads(groups=2) if share == "plain" else aligned_by_copies()
    full, row = engine.prefill(ids(CONTEXT)).row, repeated.compress(repeated.prefill(ids(CONTEXT)), Stack(share=pool))
    for step in range(4):
        tokens = ids(6 if step == 0 else 1, seed=step)
        (full,), expected = engine.feed([full], [tokens])
        (row,), logits = repeated.feed([row], [tokens])
        assert float((logits - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
    bases = 4 * 4 * 2 * 64 * 64 * 4 if share == "aligned" else 0
    assert row.bytes().total == full.bytes().total + bases
    assert 2 * full.bytes().total == repeated.shape.full_bytes(full.seen, 4)


def aligned_by_copies() -> AlignedHeads:
    """For 4 heads in 2 groups: random bases, the same for the equal heads of a group."""
    g = torch.Generator().manual_seed(0)
    turns = {
        f"{role}.{layer}": torch.linalg.qr(torch.randn(2, 64, 64, generator=g))[0].repeat_interleave(2, 0)
        for role in ("keys", "values")
        for layer in range(4)
    }
    share: AlignedHeads = conf_tree.member("share", "aligned_heads", "groups=2")
    return share.fitted(Measured(turns, {}))


def test_aligned_heads_equal_the_oracle_and_are_scored_as_they_are_read() -> None:
    """Bases that differ by head; queries of a scorer meet what their heads read."""
    engine, g = tiny_models.engine("llama", 4), torch.Generator().manual_seed(0)
    whole = engine.prefill(ids(CONTEXT), EVERYTHING)
    turns = {
        f"{role}.{i}": torch.linalg.qr(torch.randn(4, 32, 32, generator=g))[0] for role in ("keys", "values") for i in range(3)
    }
    share: Share = conf_tree.member("share", "aligned_heads", "groups=2").fitted(Measured(turns, {}))
    row = engine.compress(whole, Stack(share=share))
    for layer in range(3):
        (slot,) = row.slots[layer]
        for role, store in (("keys", slot.keys), ("values", slot.values)):
            exact = getattr(whole.row.slots[layer][0].head_group, role).exact()[4 * layer : 4 * layer + 4]
            read = torch.empty(4, CONTEXT, 32)
            store.write_to(read, slot.at)
            assert torch.allclose(read, share_oracles.aligned(exact, turns[f"{role}.{layer}"], 2), atol=1e-5)
    seen: dict[int, Tensor] = {}
    engine.compress(whole, Stack(share=share, keep=replace(conf_tree.keep("snapkv", 60), scorer=Probe(seen))))
    for layer in range(3):
        (slot,) = row.slots[layer]
        read, queries = torch.empty(4, CONTEXT, 32), whole.stats[layer].queries_QWD
        assert queries is not None
        slot.keys.write_to(read, slot.at)
        scores = queries[:, -8:] @ read.mT * 32**-0.5
        hidden = torch.arange(CONTEXT)[None] > torch.arange(CONTEXT - 8, CONTEXT)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).unflatten(0, (2, 2)).mean(1)
        assert torch.allclose(seen[layer], weights, atol=1e-6)


@dataclass(frozen=True)
class Probe(Scorer):
    """Writes down the attention of the last eight queries."""

    seen: dict[int, Tensor]

    @property
    def needs(self) -> Needs:
        return Needs(queries=8)

    def score(self, view: LayerView) -> Tensor:
        self.seen[view.layer] = view.window_attention(8)
        return view.pos_HN.float()


# --- pairs on random tensors ----------------------------------------------------------------------------------------


def stored(x: Tensor, calls: list[int], share: MiniCache, codec: str = "exact") -> PairStore:
    found: Any = None
    heads = Heads((0, 1), 0, len(x) // 2)
    for new in x.split(calls, 1):
        made = PairStore.of_pairs(new, conf_tree.member("codec", codec), share, heads)
        found = made if found is None else found.append(new, heads)
    assert isinstance(found, PairStore)
    return found


@pytest.mark.parametrize("calls", [[60], [40, 19, 1], [7] * 8 + [4]])
def test_pairs_equal_the_formulas_of_the_paper(calls: list[int]) -> None:
    x = torch.randn(6, 60, 16, generator=torch.Generator().manual_seed(0))
    share, before = MiniCache(t=0.3, retain=0.1), 0
    rule, expected = share_oracles.minicache([(0, 1)], 0.3, 0.1), []
    for new in x.split(calls, 1):
        expected.append(torch.cat(rule([new[:3], new[3:]], before)))
        before += new.shape[1]
    store = stored(x, calls, share)
    assert torch.allclose(store.read(torch.float32), torch.cat(expected, 1), atol=1e-5)
    assert torch.equal(store.read(torch.float32, slice(2, 5)), store.read(torch.float32)[2:5])
    assert store.where_HK.shape == (3, 6)


def test_whole_tokens_of_a_context_are_its_largest_angles() -> None:
    x = torch.randn(4, 100, 16, generator=torch.Generator().manual_seed(0))
    store = stored(x, [100], MiniCache())
    cosines = torch.cosine_similarity(x[:2], x[2:], dim=-1)
    for h in range(2):
        assert sorted(store.where_HK[h].tolist()) == sorted(cosines[h].argsort()[:5].tolist())
        assert torch.equal(store.read(torch.float32)[h, store.where_HK[h].long()], x[h, store.where_HK[h].long()])


@pytest.mark.parametrize("codec", ["int8", "int4", "kivi2", "hadamard_int4"])
def test_directions_go_through_any_codec(codec: str) -> None:
    """Magnitudes and whole tokens stay exact: what is lost is at most what the codec loses of a unit vector."""
    x = torch.randn(4, 300, 64, generator=torch.Generator().manual_seed(0))
    plain, coded = (stored(x, [290, 6, 4], MiniCache(), name).read(torch.float32) for name in ("exact", codec))
    error = (plain - coded).norm(dim=-1) / plain.norm(dim=-1)
    assert 0 < float(error.mean()) < {"int8": 0.02, "int4": 0.2, "kivi2": 0.8, "hadamard_int4": 0.2}[codec]


# --- batches, phases, refusals --------------------------------------------------------------------------------------


def test_together_as_alone() -> None:
    engine = tiny_models.engine("llama", 4)
    whole = engine.prefill(ids(CONTEXT), EVERYTHING)
    names = ("mqa_pool", "cla2", "yoco", "minicache_int8", "gqa_pool", "full", "similar_layers")
    rows = [engine.compress(whole, conf_tree.stack(name)) for name in names]
    rows.append(engine.compress(whole, conf_tree.stack("snapkv_similar", "keep.budget.value=0.6")))
    _, together = engine.feed(rows, [ids(4, seed=1)] * len(rows))
    for row, logits in zip(rows, together, strict=True):
        assert float((engine.feed([row], [ids(4, seed=1)])[1][0] - logits).abs().max()) <= 1e-5


def test_a_text_read_in_chunks_is_never_held_unshared() -> None:
    """Pooled from the first token on: bytes grow by a third of a head's for every token, and evictions hold the budget."""
    engine = tiny_models.engine("llama", 4)
    stack = Stack(share=PooledHeads(groups=1), keep=conf_tree.keep("h2o", 24), phase="chunked", chunk=16)
    ((row, peak),) = engine.read_chunked(ids(CONTEXT), [engine.start(stack, CONTEXT)])
    assert row.held() == [[24] * 4] * 3
    assert peak <= 3 * (24 + 16) * (2 * 32 * 4 + 8)
    for name in ("cla2", "minicache", "mqa_pool"):
        row = engine.start(conf_tree.stack(name))
        for step in range(3):
            (row,), _ = engine.feed([row], [ids(20, seed=step)])
        alone = engine.compress(engine.prefill(ids(60)), conf_tree.stack(name))
        assert row.bytes().allocated == alone.bytes().allocated, name


def test_what_a_model_cannot_share_is_refused_by_name() -> None:
    engine = tiny_models.engine("llama", 4)
    with pytest.raises(UserError, match=r"share\.groups=3 is not possible for 4 KV heads"):
        engine.check(Stack(share=PooledHeads(groups=3)))
    split = tiny_models.engine("llama", 4)
    split.groups = ((0,), (1, 2))
    with pytest.raises(UserError, match="layers 0 and 1 differ in their rotation or device"):
        split.check(Stack(share=AdjacentLayers()))
    split.check(Stack(share=PooledHeads()))


def test_labels_say_what_is_shared() -> None:
    assert Stack(share=MiniCache(t=0.5)).describe() == "minicache (t 0.5)"
    both = Stack(share=PooledHeads(groups=1), keys=conf_tree.member("codec", "int8"))
    assert both.describe() == "heads pooled to 1, int8 (axis token) keys"
    assert replace(both, share=None, keys=Exact()).describe() == "full"
