"""Learned sinks, soft caps, position biases, chunks and windows: each family equals stock transformers with everything kept, a masked
stock cache with tokens evicted, and stock's own attention weights in every statistic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from harness.engine.engine import Ask, Engine
from harness.errors import UserError
from harness.kv import attention_stats
from harness.kv.attention import NAME
from harness.kv.compat import forward
from harness.kv.families import softmax_attention
from harness.kv.forward import CURRENT
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.softmax_models import FAMILIES, engine, make
from tests.support.stock_masked import StockMasked
from tests.support.tiny_models import ids

TOLERANCE = 1e-6  # times max(1, largest absolute logit)
ONE_KERNEL = ("llama4", "phi3", "starcoder2")  # stock is sdpa, handed the mask that ours is handed
NO_WEIGHTS = ("granite_swa", "granitemoe_swa", "xglm")  # stock scales outputs by the sink; gives no weights in 5.2
WEIGHTS = [name for name in FAMILIES if FAMILIES[name].full and name not in NO_WEIGHTS]
BUDGET = 48
EVERYTHING = conf_tree.everything()


def near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    away = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    assert away <= tolerance, away


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_everything_kept_equals_stock(name: str) -> None:
    """A prompt beyond window and chunk, pieces that end inside and at the end of a chunk, single tokens; then the cache itself."""
    family, ours = FAMILIES[name], engine(name)
    model = make(family.config(), family.stock)
    cache, row, seen = DynamicCache(config=model.config), ours.start(), 0
    for n in (40, 7, 1, 1, 1, 14, 1):
        tokens = ids(n, seed=n)
        positions = torch.arange(seen, seen + n)[None]
        expected = forward(model, torch.tensor([tokens]), positions, cache, torch.tensor([-1]))[0, -1:]
        (row,), found = ours.feed([row], [tokens])
        if name in ONE_KERNEL:
            assert torch.equal(found, expected), (seen, float((found - expected).abs().max()))
        near(found, expected)
        seen += n
    assert ours.shape.full_layers == family.full
    assert row.bytes().total == sum(x.numel() * x.element_size() for one in cache.layers for x in _newest(one, ours, seen))
    for i, layer in enumerate(cache.layers):
        ((part, at),) = row.slots[i]
        near(part.keys.read(torch.float32, at), layer.keys[0, :, -part.n :])
        near(part.values.read(torch.float32, at), layer.values[0, :, -part.n :])


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "bloom", "mpt", "falcon, alibi"])
@torch.inference_mode()
def test_half_precision_is_as_near_to_fp32_as_stock_is(name: str) -> None:
    """bf16 weights and cache over 300 tokens: position biases are rounded as the family rounds them."""
    family, tokens = FAMILIES[name], torch.tensor([ids(300)])
    half = make(family.config(), family.stock, torch.bfloat16)
    exact = make(family.config(), family.stock)
    exact.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    wanted, stock = exact(tokens).logits[0, -1], half(tokens).logits[0, -1].float()
    ours = Engine(make(family.config(), NAME, torch.bfloat16), torch.bfloat16)
    _, found = ours.feed([ours.start()], [tokens[0].tolist()])
    assert float((found[0].float() - stock).abs().max()) <= 1.5 * float((stock - wanted).abs().max())


def _newest(layer: object, ours: Engine, seen: int) -> tuple[Tensor, Tensor]:
    """What the library holds of a layer; 5.2 keeps a longer storage behind a window, of which it reads this."""
    keys, values = layer.keys, layer.values  # type: ignore[attr-defined]
    assert keys.shape[2] in {one.held(seen) for one in ours.shape.layers}
    return keys, values


def away(name: str, keep: str, phase: str) -> tuple[float, float]:
    """Largest differences to the masked and to the unmasked stock model over a question and decode steps."""
    ours, config = engine(name), FAMILIES[name].config()
    reference, unmasked = (StockMasked(config, ours.shape.layers) for _ in range(2))
    tokens = ids(7, seed=1)
    row = ours.compress(prefilled(name), Stack(keep=conf_tree.keep(keep, BUDGET), phase=phase), seed=3)
    for one in (reference, unmasked):
        one.feed(ids(90), None)
    worst = plain = 0.0
    for _ in range(4):
        expected, free = reference.feed(tokens, row.kept_positions()), unmasked.feed(tokens, None)
        (row,), logits = ours.feed([row], [tokens])
        scale = max(1.0, float(expected.abs().max()))
        worst = max(worst, float((logits[0] - expected).abs().max()) / scale)
        plain = max(plain, float((free - expected).abs().max()) / scale)
        tokens = [int(expected.argmax())]
    return worst, plain


@lru_cache(maxsize=2)
def prefilled(name: str):  # type: ignore[no-untyped-def]
    ours = engine(name)
    needs = EVERYTHING
    try:
        ours.check(conf_tree.stack("expected_attention"))
    except UserError:
        needs = Needs(column_sums=True, queries=EVERYTHING.queries)
    return ours.prefill(ids(90), needs)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_evicted_equal_tokens_masked(name: str) -> None:
    """Kept sets that differ by layer and head, ragged heads, and evictions at every step."""
    kinds = [("snapkv", "prefill"), ("adakv", "prefill"), ("h2o", "always"), ("tova", "always")]
    for keep, phase in [("streaming", "always")] if name == "xglm" else kinds:  # stock xglm takes one mask for all heads
        worst, plain = away(name, keep, phase)
        assert worst <= 2 * TOLERANCE, (keep, worst)
        assert plain > 1e-4 or not FAMILIES[name].full, "masking changes nothing: the comparison has no power"


def grouped(weights_QLN: Tensor, heads: int) -> Tensor:
    """Mean over each query group, [H, L, N]."""
    return weights_QLN.unflatten(0, (heads, -1)).mean(1)


@pytest.mark.parametrize("block", [700, 1 << 20])
@pytest.mark.parametrize("name", WEIGHTS)
def test_statistics_of_a_prompt_are_those_of_stock_weights(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention_stats, softmax_attention):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", block)
    ours, stock = engine(name), StockMasked(FAMILIES[name].config(), engine(name).shape.layers)
    stock.feed(ids(90), None)
    prefix = ours.prefill(ids(90), Needs(column_sums=True, queries=9))
    row = prefix.row
    for view in (one for group in row._compressed for one in _views(row, group, prefix.stats)):
        weights_HLN = grouped(stock.weights[view.layer], view.pos_HN.shape[0])
        near(view.window_attention(9), weights_HLN[:, -9:], 5e-6)
        assert view.stats.column_sums_HN is not None
        near(view.stats.column_sums_HN, weights_HLN.sum(1), 5e-6)


def _views(row: SequenceCache, group, stats):  # type: ignore[no-untyped-def]
    from harness.kv.evicting.group_view import head_group_view

    return head_group_view(group, dict(enumerate(stats)), row.seen, 0, None).layers


@pytest.mark.parametrize("name", WEIGHTS)
def test_statistics_of_later_tokens_are_those_of_masked_stock_weights(name: str) -> None:
    """A question of several tokens and a single one, over a store that was evicted to other tokens in every layer and head."""
    ours, stock = engine(name), StockMasked(FAMILIES[name].config(), engine(name).shape.layers)
    row = ours.compress(prefilled(name), Stack(keep=conf_tree.keep("snapkv", BUDGET)), seed=3)
    stock.feed(ids(90), None)
    for tokens in (ids(7, seed=1), [5]):
        kept = row.kept_positions()
        stock.feed(tokens, kept)
        run = ours.begin([row], [len(tokens)], [Needs(column_sums=True, queries=4)])
        held = CURRENT.set(run)
        try:
            from harness.kv.compat import EntryCache

            positions = torch.arange(row.seen, row.seen + len(tokens))[None]
            with torch.inference_mode():
                forward(ours.model, torch.tensor([tokens]), positions, EntryCache(len(ours.shape.layers)), torch.tensor([-1]))
        finally:
            CURRENT.reset(held)
        seen, row = row.seen, row.after(run, 0)
        stats = [found[0] for _, found in sorted(run.stats.items())]
        for view in (one for group in row._compressed for one in _views(row, group, stats)):
            weights_HLN = grouped(stock.weights[view.layer], view.pos_HN.shape[0])
            wanted = torch.stack([w[:, p.long()] for w, p in zip(weights_HLN, view.pos_HN, strict=True)])
            assert view.stats.column_sums_HN is not None and view.pos_HN.shape[1] < seen
            near(view.stats.column_sums_HN, wanted.sum(1), 5e-6)
            near(view.window_attention(4), wanted[:, -4:], 5e-6)


def rows(name: str, names: Sequence[str]) -> list[SequenceCache]:
    """Compressed rows over contexts of two lengths."""
    ours, found = engine(name), []
    for e, n in enumerate((150, 97)):
        prefix = ours.prefill(ids(n, seed=e), Needs(column_sums=True, queries=EVERYTHING.queries))
        found += [ours.compress(prefix, conf_tree.stack(one, "keep.budget.value=0.5"), seed=e) for one in names]
    return found


COMPANY = ["snapkv", "h2o", "adakv", "sink_h2o_int8", "tova"]


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "llama4", "bloom", "falcon, alibi", "gpt_neo"])
def test_views_change_nothing(name: str) -> None:
    """Lockstep with decoded views equals lockstep without."""
    ours, held = engine(name), rows(name, COMPANY)
    asks = [Ask(row=row, held=ids(9, seed=3), max_new=12) for row in held]
    for a, b in zip(ours.answer(asks, 0), ours.answer(asks, 1 << 30), strict=True):
        assert (a.ids, a.peak, a.row.bytes()) == (b.ids, b.peak, b.row.bytes())


@pytest.mark.parametrize("name", ["granite_swa", "gpt_oss", "gemma2", "llama4", "bloom", "falcon, alibi", "gpt_neo"])
def test_company_changes_no_bit(name: str) -> None:
    """In tiles each request's logits are those it has alone, those of experts too."""
    plain, held = engine(name), rows(name, COMPANY)
    tiled = Engine(plain.model, plain.kv_dtype, invariant=True)
    feed = [ids(9 - 3 * (i % 2), seed=3 + i % 3) for i in range(len(held))]

    def logits(wave: Sequence[int]) -> dict[int, Tensor]:
        states, tokens, found = [held[i] for i in wave], [feed[i] for i in wave], []
        for step in range(3):
            states, out = tiled.feed(states, tokens)
            found.append(out)
            tokens = [[7 * step + 5]] * len(wave)
        return {i: torch.stack([out[b] for out in found]) for b, i in enumerate(wave)}

    alone = {i: one for k in range(len(held)) for i, one in logits([k]).items()}
    order = random.Random(0).sample(range(len(held)), len(held))
    for wave in (order[:4], order[4:], order):
        for i, one in logits(wave).items():
            assert torch.equal(one, alone[i]), i


@pytest.mark.parametrize(
    ("name", "why"), [("gemma2", "soft-capped"), ("gpt_neo", "local layers"), ("llama4", "scaled by their positions")]
)
def test_predicted_queries_are_refused_where_they_cannot_be(name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        engine(name).check(conf_tree.stack("expected_attention"))


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon, alibi"])
def test_positions_in_the_cache_are_refused_without_rotation(name: str) -> None:
    with pytest.raises(UserError, match="no rotary positions that can be rotated back"):
        engine(name).check(conf_tree.stack("streaming_cache"))


@pytest.mark.parametrize("name", ["gpt_oss", "granite_swa"])
def test_rotation_of_sinks_families_can_be_undone(name: str) -> None:
    """positions=cache and predicted queries are theirs too."""
    ours = engine(name)
    assert not ours.rope_moves and all(rope is not None for rope in ours.ropes)
    for stack in ("streaming_cache", "expected_attention"):
        ours.check(conf_tree.stack(stack))
