"""Latent attention (MLA): each family equals stock transformers, evicted a masked cache; d_c + d_r numbers a token are stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.compat import forward
from harness.stages.protocols import LayerView, Needs, Scorer
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.latent_models import D_C, D_R, FAMILIES, HEADS
from tests.support.masked_reference import NAME as REFERENCE
from tests.support.masked_reference import MaskedCache, attend
from tests.support.tiny_models import build, ids

CONTEXT, BUDGET = 90, 48
ONE = "deepseek_v3"  # where one family is enough
TOKEN = (D_C + D_R) * 4  # bytes of a token and layer, fp32


@lru_cache(maxsize=2)
def engine(name: str) -> Engine:
    return Engine(build(FAMILIES[name](), "kv_harness"), torch.float32)


@lru_cache(maxsize=1)
def prefilled(name: str) -> Prefix:
    return engine(name).prefill(ids(CONTEXT), conf_tree.everything())


def stock(name: str, attention: str = "sdpa") -> PreTrainedModel:
    return build(FAMILIES[name](), attention)


def fed(model: PreTrainedModel, cache: DynamicCache, tokens: list[int], seen: int) -> Tensor:
    """Last logits [1, V] of stock transformers."""
    positions = torch.arange(seen, seen + len(tokens))[None]
    with torch.inference_mode():
        return forward(model, torch.tensor([tokens]), positions, cache, torch.tensor([-1]))[0]


def holds_latents(cache: DynamicCache) -> bool:
    """Whether this version of transformers caches latents; older ones cache the keys and values that they expand to."""
    return bool(cache.layers[0].keys.shape[1] == 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_kept_equals_stock_and_its_bytes(name: str) -> None:
    """Bit for bit where stock expands all latents in every forward too; within rounding where it keeps what it expanded."""
    ours, model = engine(name), stock(name)
    cache, row, seen = DynamicCache(config=model.config), ours.start(), 0
    for n in (40, 9, 1, 1):
        expected = fed(model, cache, ids(n, seed=n), seen)
        (row,), found = ours.feed([row], [ids(n, seed=n)])
        seen += n
        if holds_latents(cache):
            assert torch.equal(found, expected), (seen, float((found - expected).abs().max()))
        else:
            assert float((found - expected).abs().max()) <= 1e-6 * max(1.0, float(expected.abs().max()))
    layers = len(ours.shape.layers)
    assert layers == len(cache.layers) == model.config.num_hidden_layers
    assert row.bytes().total == ours.shape.full_bytes(seen, 4) == seen * layers * TOKEN
    if holds_latents(cache):
        assert row.bytes().total == sum(x.numel() * 4 for one in cache.layers for x in (one.keys, one.values))


def masked(name: str) -> MaskedCache:
    return MaskedCache(stock(name, REFERENCE), [None] * len(engine(name).shape.layers))


def check_evicted(name: str, keep: str, phase: str) -> None:
    ours, context, tokens = engine(name), ids(CONTEXT), ids(7, seed=1)
    reference, unmasked = masked(name), masked(name)
    row = ours.compress(prefilled(name), Stack(keep=conf_tree.keep(keep, BUDGET), phase=phase), seed=3)
    for one in (reference, unmasked):
        one.feed(context, None)
    away = 0.0
    for _ in range(3):
        kept = [heads * HEADS for heads in row.kept_positions()]  # one set of tokens for all heads of a layer
        expected, plain = reference.feed(tokens, kept), unmasked.feed(tokens, None)
        (row,), logits = ours.feed([row], [tokens])
        assert float((logits[0] - expected).abs().max()) <= 2e-6 * max(1.0, float(expected.abs().max()))
        away = max(away, float((plain - expected).abs().max()))
        tokens = [int(expected.argmax())]
    assert away > 1e-3, "masking changes nothing: the comparison has no power"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("phase", ["prefill", "always"])
def test_evicted_equals_masked(name: str, phase: str) -> None:
    check_evicted(name, "sink_h2o", phase)


def legal() -> Iterator[tuple[str, str]]:
    """(keep, phase) of every keep that does not divide its budget over heads."""
    for keep in conf_tree.members("keep"):
        found = conf_tree.keep(keep, BUDGET)
        if type(found.heads).__name__ == "Uniform":
            yield from ((keep, p) for p in ("prefill", "always") if p in found.scorer.phases and p in found.layers.phases)


@pytest.mark.parametrize(("keep", "phase"), list(legal()))
def test_every_scorer_evicts_one_set_of_tokens_a_layer(keep: str, phase: str) -> None:
    check_evicted(ONE, keep, phase)


@pytest.mark.parametrize("split", ["adakv", "retrieval"])
def test_budgets_by_head_are_refused_with_the_reason(split: str) -> None:
    heads = conf_tree.split("heads", split) if split == "adakv" else None
    keep = conf_tree.keep("snapkv", BUDGET, heads=heads) if heads else conf_tree.keep("duo", BUDGET)
    with pytest.raises(UserError, match=r"all heads of a layer read one latent.*legal is keep.heads=uniform"):
        engine(ONE).compress(prefilled(ONE), Stack(keep=keep))


# --- what scorers see --------------------------------------------------------------------------------------------


def eager(name: str, tokens: list[int]) -> tuple[Tensor, ...]:
    """Attention weights [Q, T, T] of every layer, as transformers' own eager attention returns them."""
    with torch.inference_mode():
        found = stock(name, "eager")(torch.tensor([tokens]), output_attentions=True).attentions
    return tuple(w[0] for w in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_column_sums_equal_eager_weights(name: str) -> None:
    """The heads of a layer are one query group: their sums are averaged, in the context and in every step after it."""
    tokens = ids(60)
    prefix, weights = engine(name).prefill(tokens, Needs(column_sums=True)), eager(name, tokens)
    for stats, w in zip(prefix.stats, weights, strict=True):
        assert stats.column_sums_HN is not None and stats.column_sums_HN.shape == (1, 60)
        torch.testing.assert_close(stats.column_sums_HN[0], w.sum(1).mean(0), atol=1e-4, rtol=1e-5)
    row = engine(name).compress(prefix, Stack(keep=conf_tree.keep("h2o", 80), phase="always"))
    more = ids(5, seed=4)
    for token in more:
        (row,), _ = engine(name).feed([row], [[token]])
    sums = torch.cat([slot.head_group.sums_HN[slot.at] for i in sorted(row.slots) for slot in row.slots[i]])  # type: ignore[index]
    wanted = torch.stack([w.sum(1).mean(0) for w in eager(name, tokens + more)])
    torch.testing.assert_close(sums, wanted, atol=1e-4, rtol=1e-5)


class Looking(Scorer):
    """Writes its views down."""

    def __init__(self) -> None:
        self.seen: dict[int, LayerView] = {}

    @property
    def needs(self) -> Needs:
        return Needs(queries=8, query_moments=True)

    def score(self, view: LayerView) -> Tensor:
        self.seen[view.layer] = view
        return view.k_HND.norm(dim=-1)


@contextmanager
def given_to_attention(seen: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, the keys and values [H, N, D] that the reference attention is given are appended, layer by layer."""

    def noting(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((k[0].clone(), v[0].clone()))
        return attend(module, q, k, v, *args, **kwargs)

    AttentionInterface.register(REFERENCE, noting)
    try:
        yield
    finally:
        AttentionInterface.register(REFERENCE, attend)


@pytest.mark.parametrize("name", FAMILIES)
def test_scorers_see_the_keys_values_and_attention_of_all_heads(name: str) -> None:
    looking, tokens = Looking(), ids(60)
    stack = Stack(keep=replace(conf_tree.keep("knorm", 40), scorer=looking, recent=20))
    row = engine(name).compress(engine(name).prefill(tokens, looking.needs), stack)
    seen: list[tuple[Tensor, Tensor]] = []
    with given_to_attention(seen):
        masked(name).feed(tokens, None)
    for layer, ((k, v), weights) in enumerate(zip(seen, eager(name, tokens), strict=True)):
        view = looking.seen[layer]
        torch.testing.assert_close(view.k_HND, k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(view.v_HND, v, atol=1e-5, rtol=1e-5)
        wanted = weights[:, -8:].mean(0).expand(HEADS, -1, -1)
        torch.testing.assert_close(view.window_attention(8), wanted, atol=1e-5, rtol=1e-4)
        best = k.norm(dim=-1).mean(0)[:40].topk(20).indices.sort().values
        assert row.kept_positions()[layer][0].tolist() == [*best.tolist(), *range(40, 60)]


@pytest.mark.parametrize("name", FAMILIES)
def test_query_moments_are_those_before_the_rotation(name: str) -> None:
    """The same tokens at other positions: their own queries differ only where attention mixed positions in, in layer 0 not at all."""
    ours = engine(name)
    first, later = (ours.prefill(t, Needs(query_moments=True)) for t in (ids(1), ids(1) * 5))
    a, b = first.stats[0].query_mean_QD, later.stats[0].query_mean_QD
    assert a is not None and b is not None
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
