"""Layers of one model that differ: head sizes, KV heads, windows, and layers that read another layer's store."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from transformers import PretrainedConfig

from harness.configure.arms import Arm
from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.evaluation.assemble import _check_heads
from harness.families.tiny import tiny_config
from harness.families.trial import HONOURED, try_family
from harness.kv.compat import shape_of
from harness.kv.memory import predict
from harness.kv.shape import LayerShape
from harness.models.load import ModelSpec
from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.protocols import Needs
from harness.stages.score.h2o import H2O
from harness.stages.score.knorm import KeyNorm
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.tiny_models import build, ids

CONTEXT = 90
FAMILIES = ("gemma3n_text", "gemma4_text")  # four layers that store, then two that read the last of their kind


@lru_cache(maxsize=2)
def engine(family: str) -> Engine:
    return Engine(build(tiny_config(family), "kv_harness"), torch.float32)


def stacks() -> list[Stack]:
    """Evicting, encoding, both; budgets in bytes and fractions."""
    found = [Stack(keys=conf_tree.member("codec", name), values=conf_tree.member("codec", name)) for name in ("int8", "kivi2")]
    found += [
        Stack(keep=Keep(scorer=KeyNorm(), budget=Amount(unit=unit, value=value)))
        for unit, value in (("fraction", 0.3), ("bytes", 60_000))
    ]
    return [
        *found,
        Stack(keep=Keep(scorer=H2O(), budget=Amount(value=0.5)), keys=conf_tree.member("codec", "int8"), phase="always"),
    ]


def test_each_layer_has_its_own_shape() -> None:
    shape = engine("gemma4_text").shape
    sliding, full = shape.layers[0], shape.layers[3]
    assert (sliding.heads, sliding.d_key, sliding.window) == (2, 32, 16)
    assert (full.d_key, full.window) == (64, None)
    assert shape.numbers == (0, 1, 2, 3) and shape.readers == ((4, 2), (5, 3))


def test_settings_of_sliding_layers_and_of_values() -> None:
    """Names that some families have for their sliding layers, and for the width of values."""
    from harness.kv.families.layer_shapes import layer_shape

    names = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 24, "model_type": "any"}
    one = PretrainedConfig(**names, swa_num_key_value_heads=4, swa_head_dim=8, swa_v_head_dim=12)
    assert layer_shape(one, None) == LayerShape(2, 16, 24)
    assert layer_shape(one, 16) == LayerShape(4, 8, 12, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_readers_equal_transformers_kept_evicted_and_in_bytes(family: str) -> None:
    """Everything kept bit for bit, evicted tokens hidden from the readers too, a store counted once."""
    found = try_family(family)
    assert (found.status, found.difference) == (HONOURED, 0.0), found.reason


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_every_stack_are_the_closed_formula_and_budgets_hold(family: str) -> None:
    ours = engine(family)
    needs = Needs(column_sums=True)
    for stack in stacks():
        cache = ours.compress(ours.prefill(ids(CONTEXT), needs), stack)
        kept = CONTEXT if cache.budget is None else cache.budget
        assert {n for layer in ours.shape.full_layers for n in cache.held()[layer]} == {kept}
        assert cache.bytes().total == predict(stack, ours.shape, kept, 4, CONTEXT)
        budget = stack.keep.budget if stack.keep else None
        if budget is not None and budget.unit == "bytes":
            assert cache.bytes().total <= budget.value < predict(stack, ours.shape, kept + 1, 4, CONTEXT)
    with pytest.raises(UserError, match="too small"):
        ours.compress(ours.prefill(ids(CONTEXT)), Stack(keep=Keep(scorer=KeyNorm(), budget=Amount(unit="bytes", value=1000))))


@pytest.mark.parametrize("family", FAMILIES)
def test_arms_in_lockstep_equal_each_alone_with_views_and_without(family: str) -> None:
    ours = engine(family)
    prefix = ours.prefill(ids(CONTEXT), Needs(column_sums=True))
    asks = [Ask(row=ours.compress(prefix, stack), held=ids(5 + i, seed=i), max_new=6) for i, stack in enumerate(stacks())]
    together = ours.answer(asks, views=1 << 24)
    for ask, found in zip(asks, together, strict=True):
        (alone,) = ours.answer([ask])
        assert (alone.ids, alone.row.held(), alone.row.bytes()) == (found.ids, found.row.held(), found.row.bytes())


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_of_the_owners_queries_alone(family: str) -> None:
    """Column sums of a store that is read twice add up to its owner's queries: one for each token and head."""
    ours = engine(family)
    prefix = ours.prefill(ids(CONTEXT), Needs(column_sums=True))
    for layer in ours.shape.full_layers:
        sums = prefix.stats[layer].column_sums_HN
        assert sums is not None and torch.allclose(sums.sum(1), torch.full((sums.shape[0],), float(CONTEXT)))


def test_codecs_are_checked_against_the_layers_that_stacks_compress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 32 in sliding layers, of 64 in the others: groups of 64 are right, groups of 48 are not."""
    monkeypatch.setattr(ModelSpec, "config", lambda spec: tiny_config("gemma4_text"))
    spec = ModelSpec(source="path", path="none")
    for group, fits in ((64, True), (48, False)):
        codec = conf_tree.member("codec", "int4", f"group={group}", "axis=token")
        arms = [Arm("one", {}, {}, Stack(keys=codec, values=codec))]
        if fits:
            _check_heads(arms, spec)
        else:
            with pytest.raises(UserError, match="must divide head_dim 64"):
                _check_heads(arms, spec)


def test_errors_of_attention_are_those_of_all_layers_that_attend() -> None:
    ours = engine("gemma4_text")
    prefix = ours.prefill(ids(CONTEXT))
    rows = [prefix.row, ours.compress(prefix, stacks()[0])]
    step = ours.read(rows, [ids(3)] * 2, reference=[0, 0])
    assert step.errors.shape == (6, 2, 2) and ours.shape.attending == list(range(6))
    assert (step.errors[:, 0, 0] == 0).all() and (step.errors[[3, 5], 1, 0] > 0).all()


def test_readers_without_a_word_on_whose_store_they_read_are_refused() -> None:
    config = tiny_config("llama")
    config.num_kv_shared_layers = 2
    with pytest.raises(UserError, match="does not say which"):
        shape_of(config)
