"""An evicted cache equals a full cache with the evicted tokens masked out: every scorer, phase, head layout and family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.stages.heads.uniform_heads import Uniform
from harness.stages.protocols import LayerView
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.masked_reference import NAME as REFERENCE
from tests.support.masked_reference import MaskedCache
from tests.support.tiny_models import FAMILIES, build, ids, tiny, tiny_a

CONTEXT, BUDGET = 90, 48
QUESTION, STEPS = 7, 4
TOLERANCE = 1e-6  # times max(1, largest absolute logit)
EVERYTHING = conf_tree.everything()
KEEPS = conf_tree.members("keep")


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Layers in turn get more and fewer tokens; their mean is the budget or a little less."""

    by: int = 8

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        n = len(views)
        return [tokens + (self.by * (n - 1 - 2 * i)) // max(n - 1, 1) - 1 for i in range(n)]


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Every other head gives `by` tokens to its neighbour; a last head without one keeps its share."""

    by: int = 5

    def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
        h, by = scores_HM.shape[0], min(self.by, tokens)
        return [tokens + (by if i % 2 else -by) if i // 2 < h // 2 else tokens for i in range(h)]


SPLITS: dict[str, dict[str, Any]] = {"uniform": {}, "ragged_layers": {"layers": Slope()}, "ragged_heads": {"heads": Odd()}}


def phases(name: str, split: str) -> list[str]:
    keep = conf_tree.keep(name, BUDGET)
    allowed = [p for p in keep.scorer.phases if p in keep.layers.phases]
    ragged = split == "ragged_heads" or not isinstance(keep.heads, Uniform)
    return ["prefill"] if ragged else [p for p in allowed if p in ("prefill", "always")]


@lru_cache(maxsize=2)
def prefilled(family: str, kv_heads: int) -> tuple[Engine, Prefix]:
    engine = tiny_models.engine(family, kv_heads)
    return engine, engine.prefill(ids(CONTEXT), EVERYTHING)


@dataclass(frozen=True)
class Whole:
    """A full cache that has read a context, to be copied, and what it says after the question: shared by all stacks.

    Attributes:
        cache: before the question.
        logits: [V] after the question, all tokens read.
    """

    cache: MaskedCache
    logits: Tensor


def reads(model: PreTrainedModel, windows: list[int | None], context: Sequence[int]) -> Whole:
    cache = MaskedCache(model, windows)
    cache.feed(context, None)
    return Whole(cache, cache.copy().feed(ids(QUESTION, seed=1), None))


@lru_cache(maxsize=2)
def read(family: str, kv_heads: int) -> Whole:
    """Of a tiny model."""
    windows = [layer.window for layer in prefilled(family, kv_heads)[0].shape.layers]
    return reads(tiny(family, REFERENCE, kv_heads), windows, ids(CONTEXT))


def run(engine: Engine, prefix: Prefix, stack: Stack, whole: Whole) -> tuple[float, float]:
    """Largest difference of logits over the question and the decode steps, and the difference to an unmasked cache's.

    `whole` has read the prefix's context.
    """
    row = engine.compress(prefix, stack, seed=3)
    reference = whole.cache.copy()
    worst, away = 0.0, None
    tokens = ids(QUESTION, seed=1)
    for _ in range(STEPS):
        expected = reference.feed(tokens, row.kept_positions())
        (row,), logits = engine.feed([row], [tokens])
        scale = max(1.0, float(expected.abs().max()))
        worst = max(worst, float((logits[0] - expected).abs().max()) / scale)
        away = float((whole.logits - expected).abs().max()) / scale if away is None else away
        tokens = [int(expected.argmax())]
    assert away is not None
    assert row.seen == reference.seen == whole.cache.seen + QUESTION + STEPS - 1
    return worst, away


def check(name: str, split: str, family: str, kv_heads: int) -> None:
    engine, prefix = prefilled(family, kv_heads)
    for phase in phases(name, split):
        stack = Stack(keep=conf_tree.keep(name, BUDGET, **SPLITS[split]), phase=phase)
        worst, away = run(engine, prefix, stack, read(family, kv_heads))
        assert worst <= TOLERANCE, (phase, worst)
        if engine.shape.full_layers:
            assert away > 1e-3, (phase, "masking changes nothing: the comparison has no power", away)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", KEEPS)
def test_llama(name: str, kv_heads: int, split: str) -> None:
    check(name, split, "llama", kv_heads)


@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("family", [*FAMILIES[1:], "mistral_full"])
def test_other_families(family: str, name: str) -> None:
    for split in SPLITS:
        check(name, split, family, 4 if family == "gpt2" else 2)


def rows_kept(split: str, kv_heads: int = 2) -> list[list[int]]:
    engine, prefix = prefilled("llama", kv_heads)
    stack = Stack(keep=conf_tree.keep("knorm", BUDGET, **SPLITS[split]))
    return engine.compress(prefix, stack).held()


def test_the_splits_are_really_ragged() -> None:
    assert rows_kept("uniform") == [[48, 48]] * 3
    assert rows_kept("ragged_layers") == [[55, 55], [47, 47], [39, 39]]
    assert rows_kept("ragged_heads", 4) == [[43, 53, 43, 53]] * 3


# --- positions after eviction ------------------------------------------------------------------------------------


def test_case_15_the_next_token_stands_at_the_number_of_tokens_seen() -> None:
    """One layer, the last 128 of 300 tokens kept: decoding equals a fresh run on those 128 (RoPE sees distances only)."""
    config = tiny_a(num_hidden_layers=1)
    engine = Engine(build(config, "kv_harness"), torch.float32)
    tokens = ids(303)
    row = engine.compress(engine.prefill(tokens[:300]), Stack(keep=conf_tree.keep("window", 128)))
    assert row.kept_positions()[0][0].tolist() == list(range(172, 300))
    fresh = engine.prefill(tokens[172:300]).row
    for token in tokens[300:]:
        (row, fresh), logits = engine.feed([row, fresh], [[token], [token]])
        scale = max(1.0, float(logits.abs().max()))
        assert float((logits[0] - logits[1]).abs().max()) <= 1e-5 * scale
    assert row.seen == 303
    assert int(row.kept_positions()[0][1][-1]) == 302


def test_case_16_layers_with_different_kept_lengths() -> None:
    """A pyramid of 32, 24, 16, 8 tokens on TINY-A equals the masked full cache over five steps."""

    @dataclass(frozen=True, kw_only=True)
    class Pyramid:
        def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
            return [32, 24, 16, 8]

    engine = Engine(build(tiny_a(), "kv_harness"), torch.float32)
    context = ids(100)
    stack = Stack(keep=conf_tree.keep("streaming", 20, layers=Pyramid()))
    worst, away = run(engine, engine.prefill(context), stack, reads(build(tiny_a(), REFERENCE), [None] * 4, context))
    assert worst <= TOLERANCE
    assert away > 1e-3


# Kept sets of all members are compared on the default model elsewhere; here one of each kind of store is enough: with scores,
# one set for all heads, sinks, a window, heads and layers of several lengths.
STORES = ("h2o", "tova", "streaming", "snapkv", "adakv", "pyramidkv")


@pytest.fixture(scope="module")
def default_model() -> tuple[Engine, Prefix, Whole]:
    """(engine, what it has read, a full cache that has read the same)."""
    from harness.models.load import load
    from tests.integration.models.test_model_load import configured

    spec = configured("smollm2", kv_dtype="float32")
    context = load(spec).tokens.encode(Path(__file__).read_text())[:400]
    engine = Engine(load(spec, "kv_harness").model, torch.float32)
    whole = reads(load(spec, REFERENCE).model, [None] * 30, context)
    return engine, engine.prefill(context, EVERYTHING), whole


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
def test_default_model(name: str, default_model: tuple[Engine, Prefix, Whole]) -> None:
    engine, prefix, whole = default_model
    stacks = [Stack(keep=conf_tree.keep(name, 100), phase=phase) for phase in phases(name, "uniform")]
    stacks.append(Stack(keep=conf_tree.keep(name, 100, heads=Odd(), layers=Slope(by=20))))
    for stack in stacks:
        worst, away = run(engine, prefix, stack, whole)
        assert worst <= 1e-4, (stack.phase, worst)
        assert away > 1e-3
