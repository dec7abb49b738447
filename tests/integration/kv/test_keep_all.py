"""An uncompressed row equals transformers' own cache and sdpa bit for bit, in every family; statistics change no bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from harness.engine.engine import Engine
from harness.kv.compat import EntryCache, forward
from harness.kv.forward import CURRENT
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from tests.support import tiny_models
from tests.support.tiny_models import FAMILIES, ids, tiny

PROMPT = 40
# A prompt longer than the sliding window of 16, a chunk, single tokens; then a window that fills while decoding, and exactly.
CALLS = ((PROMPT, 9, 1, 1, 1, 1, 3, 1), (7, 4, 1, 1, 1, 1, 1, 1, 1), (15, 1, 1, 2), (16, 1))
EVERYTHING = Needs(column_sums=True, queries=32)
ALL, LAST = slice(None), torch.tensor([-1])  # logits asked for


def all_logits(engine: Engine, row: SequenceCache, tokens: list[int], needs: Needs) -> tuple[SequenceCache, Tensor]:
    """One forward of the engine's parts with the logits of all its tokens [L, V]."""
    run = engine.begin([row], [len(tokens)], [needs])
    held = CURRENT.set(run)
    try:
        cache = EntryCache(len(engine.shape.layers))
        positions = torch.arange(row.seen, row.seen + len(tokens))[None]
        logits = forward(engine.model, torch.tensor([tokens]), positions, cache, ALL)
    finally:
        CURRENT.reset(held)
    return row.after(run, 0), logits[0]


def stock_logits(model: PreTrainedModel, cache: DynamicCache, seen: int, tokens: list[int], keep: Tensor | slice) -> Tensor:
    positions = torch.arange(seen, seen + len(tokens))[None]
    return forward(model, torch.tensor([tokens]), positions, cache, keep)[0]


def calls(lengths: Sequence[int] = CALLS[0]) -> list[list[int]]:
    tokens = iter(ids(sum(lengths)))
    return [[next(tokens) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_logit_equals_stock(family: str, kv_heads: int) -> None:
    engine, model = tiny_models.engine(family, kv_heads), tiny(family, "sdpa", kv_heads)
    for needs, lengths in product((Needs(), EVERYTHING), CALLS):
        cache, row, seen = DynamicCache(config=model.config), engine.start(), 0
        for tokens in calls(lengths):
            expected = stock_logits(model, cache, seen, tokens, ALL)
            row, found = all_logits(engine, row, tokens, needs)
            assert torch.equal(found, expected), (seen, len(tokens), float((found - expected).abs().max()))
            seen += len(tokens)
        assert row.seen == seen


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_engine_gives_stock_last_logits_and_rows(family: str) -> None:
    engine, model = tiny_models.engine(family), tiny(family, "sdpa")
    first, *rest = calls()
    cache = DynamicCache(config=model.config)
    stock_logits(model, cache, 0, first, LAST)
    prefix = engine.prefill(first, EVERYTHING)
    row, seen = prefix.row, len(first)
    for tokens in rest:
        expected = stock_logits(model, cache, seen, tokens, LAST)
        (row,), logits = engine.feed([row], [tokens])
        assert torch.equal(logits, expected)
        seen += len(tokens)
    for i, layer in enumerate(engine.shape.layers):
        ((part, at),) = row.slots[i]
        k, v = cache.layers[i].keys[0], cache.layers[i].values[0]
        assert part.n == layer.held(seen)
        assert torch.equal(part.keys.read(torch.float32, at), k[:, -part.n :])
        assert torch.equal(part.values.read(torch.float32, at), v[:, -part.n :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_half_precision_models_equal_stock_too(dtype: torch.dtype) -> None:
    for family in ("llama", "gemma3"):
        config = tiny_models.config(family)
        engine = Engine(tiny_models.build(config, "kv_harness", dtype), dtype)
        model = tiny_models.build(config, "sdpa", dtype)
        cache, row, seen = DynamicCache(config=model.config), engine.start(), 0
        for tokens in calls():
            expected = stock_logits(model, cache, seen, tokens, ALL)
            row, found = all_logits(engine, row, tokens, EVERYTHING)
            assert torch.equal(found, expected)
            seen += len(tokens)


@torch.inference_mode()
def test_the_sliding_window_is_honoured() -> None:
    """Without its window mistral answers otherwise: the equality above would notice a window that is not applied."""
    tokens = ids(PROMPT)
    with_window, without = tiny_models.engine("mistral"), tiny_models.engine("mistral_full")
    assert with_window.shape.layers[0].window == tiny_models.WINDOW
    assert without.shape.layers[0].window is None
    (_, a), (_, b) = (all_logits(e, e.start(), tokens, Needs()) for e in (with_window, without))
    assert torch.equal(a[: tiny_models.WINDOW], b[: tiny_models.WINDOW])
    assert float((a[-1] - b[-1]).abs().max()) > 1e-2


@torch.inference_mode()
def test_rounding_to_the_cache_dtype_happens_before_attention() -> None:
    """fp32 model, bf16 cache: the logits equal those of a stock model whose cache rounds on entry."""
    engine = Engine(tiny("llama"), torch.bfloat16)
    model = tiny("llama", "sdpa")

    class Rounding(DynamicCache):  # type: ignore[misc]
        def update(self, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            k, v = (x.to(torch.bfloat16).float() for x in (k, v))
            found: tuple[Tensor, Tensor] = super().update(k, v, *args, **kwargs)
            return found

    cache, row, seen = Rounding(config=model.config), engine.start(), 0
    for tokens in calls():
        expected = stock_logits(model, cache, seen, tokens, ALL)
        row, found = all_logits(engine, row, tokens, Needs())
        assert torch.equal(found, expected)
        seen += len(tokens)
    assert row.bytes().total == engine.shape.full_bytes(seen, 2)
