"""Every storage that a row holds is counted once, copies too, and no layer keeps the rows of another one alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine.engine import Engine
from harness.engine.requests import Question
from harness.errors import UserError
from harness.kv import storing
from harness.kv.sequence_cache import SequenceCache
from harness.stages.budget import Amount
from harness.stages.codec.by_layer import ByLayer
from harness.stages.keep import Keep
from harness.stages.layers.pyramid import Pyramid
from harness.stages.score.h2o import H2O
from harness.stages.score.snapkv import SnapKV
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.asking import results
from tests.support.tiny_models import build, ids, tiny_a


def reached(found: Any) -> Iterator[Tensor]:
    """Every tensor with elements of its own that can be reached from a value; counters of clipped elements are no rows."""
    if isinstance(found, Tensor):
        yield from [found] if found.dim() else []
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from reached(one)
    else:
        for one in (found if isinstance(found, dict) else getattr(found, "__dict__", {})).values():
            yield from reached(one)


def held(row: SequenceCache) -> int:
    storages = [t.untyped_storage() for part in row.head_groups for t in reached(part)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def test_constants_are_held_and_counted_once_after_layers_part() -> None:
    """Frozen scales were copied for the rows and for the codec once layers held different numbers: 36,704 bytes held."""
    engine, codec = Engine(build(tiny_a(), "kv_harness"), torch.bfloat16), conf_tree.member("codec", "int8_static")
    keep = conf_tree.keep("streaming", 24, layers=Pyramid(), recent=8)
    stack = Stack(keep=keep, keys=codec, values=codec, phase="chunked", chunk=32)
    ((row, _),) = engine.read_chunked(ids(100), [engine.start(stack, 100)])
    (row,), _ = engine.feed([row], [ids(3)])
    rows, scales = 27 * 8 * (2 * 64 + 4), 8 * 2 * 64 * 4
    assert len({n for layer in row.held() for n in layer}) > 1
    assert row.bytes().total == held(row) == rows + scales == 32_608


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("name", conf_tree.members("compress"))
def test_every_stack_reports_what_it_holds(family: str, name: str) -> None:
    engine, stack = tiny_models.engine(family), conf_tree.stack(name)
    try:
        engine.check(stack)
    except UserError:
        return
    if stack.chunked:
        ((row, _),) = engine.read_chunked(ids(150), [engine.start(stack, 150)])
    else:
        row = engine.compress(engine.prefill(ids(150), stack.needs), stack)
    for n in (3, 1, 40):
        assert row.bytes().total == held(row)
        (row,), _ = engine.feed([row], [ids(n)])
    assert row.bytes().total == held(row)


@pytest.mark.parametrize("phase", ["prefill", "chunked", "always"])
@pytest.mark.parametrize("codec", ["exact", "int8", "int4_token"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_layers_that_part_let_go_of_each_other(monkeypatch: pytest.MonkeyPatch, phase: str, codec: str, kv_heads: int) -> None:
    """At the sizes of large models every layer is a slice of one tensor; the lowest layer of a pyramid keeps all of its rows."""
    monkeypatch.setattr(storing, "GROUP_ELEMENTS", 1)
    engine, both = Engine(tiny_models.tiny("llama", kv_heads=kv_heads), torch.float32), conf_tree.member("codec", codec)
    keep = Keep(scorer=H2O(), budget=Amount(value=0.75), layers=Pyramid(), recent=35)
    stack = Stack(keep=keep, keys=both, values=both, phase=phase, chunk=60)
    prefix = engine.prefill(ids(100), stack.needs)
    if phase == "chunked":
        ((row, _),) = engine.read_chunked(ids(100), [engine.start(stack, 100)])
    else:
        row = engine.compress(prefix, stack)
    assert row.held()[0] == [100] * kv_heads and row.held()[2][0] < 75
    for n in (1, 2):
        assert row.bytes().total == sum(row.bytes().logical.values()) == held(row)
        (row,), _ = engine.feed([row], [ids(n)])
    assert prefix.row.bytes().total == held(prefix.row) == 100 * kv_heads * 3 * 2 * 32 * 4


@pytest.mark.parametrize("elements", [1, 2 * 2 * 150 * 64])
@pytest.mark.parametrize(
    "name", ["cla2", "yoco", "minicache", "minicache_int8", "similar_layers", "gqa_pool", "snapkv_similar"]
)
def test_layers_that_share_let_go_of_the_others(monkeypatch: pytest.MonkeyPatch, name: str, elements: int) -> None:
    """At the sizes of large models a layer, or every two, is a slice of one tensor.

    Found by: merged layers of a model with 8 KV heads of 128 reported the full cache's bytes from 4,096 tokens on, and readers
    alone in a group were an error. The kind: what stays of a prefill must not hold what does not.
    """
    monkeypatch.setattr(storing, "GROUP_ELEMENTS", elements)
    engine, stack = Engine(build(tiny_a(), "kv_harness"), torch.float32), conf_tree.stack(name)
    prefix = engine.prefill(ids(150), stack.needs)
    row = engine.compress(prefix, stack)
    full = prefix.row.bytes().total
    assert row.bytes().total == sum(row.bytes().logical.values()) == held(row) < full
    monkeypatch.undo()
    assert row.bytes().total == engine.compress(engine.prefill(ids(150), stack.needs), stack).bytes().total
    (grown,), _ = engine.feed([row], [ids(3)])
    assert grown.bytes().total == sum(grown.bytes().logical.values()) == held(grown)
    assert prefix.row.bytes().total == held(prefix.row) == full


@pytest.mark.parametrize("elements", [1, 2 * 2 * 150 * 64])
def test_a_layer_that_stays_exact_lets_go_of_those_that_are_encoded(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """The same kind, by bits: of four layers two stay exact, one of them in a slice of its own."""
    monkeypatch.setattr(storing, "GROUP_ELEMENTS", elements)
    engine = Engine(build(tiny_a(), "kv_harness"), torch.float32)
    by_layer = ByLayer(
        codecs={"exact": conf_tree.member("codec", "exact"), "int8": conf_tree.member("codec", "int8")},
        layers=("exact", "int8", "int8", "exact"),
    )
    row = engine.compress(engine.prefill(ids(150)), Stack(keys=by_layer, values=by_layer))
    exact, coded = 2 * 2 * 2 * 150 * 64 * 4, 2 * 2 * 2 * 150 * (64 + 4)  # layers, keys and values, heads
    assert row.bytes().total == sum(row.bytes().logical.values()) == held(row) == exact + coded


def test_a_full_cache_and_even_layers_still_share_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "GROUP_ELEMENTS", 1)
    engine = tiny_models.engine("llama")
    prefix = engine.prefill(ids(100))
    full = engine.compress(prefix, Stack())
    assert full.bytes() == prefix.row.bytes()
    assert all(a is b for a, b in zip(full.head_groups, prefix.row.head_groups, strict=True))


def test_scores_of_a_row_do_not_hold_those_of_its_neighbours() -> None:
    """A model with one full layer: column sums of all rows of a batch are made in one tensor."""
    engine = tiny_models.engine("gemma3")
    stack = Stack(keep=conf_tree.keep("h2o", 60), phase="always")
    rows, _ = engine.feed([engine.start(stack, 50) for _ in range(4)], [ids(50, seed=s) for s in range(4)])
    assert {row.bytes().total for row in rows} == {held(row) for row in rows}
    assert all(row.bytes().logical["state"] == row.bytes().allocated["state"] for row in rows)


@pytest.mark.parametrize(
    ("tokens", "budget", "says"),
    [(100, 60, "uniform (asked: pyramid)"), (100, 40, "pyramid"), (40, 60, "uniform (asked: pyramid)")],
)
def test_what_the_budget_of_layers_really_was_is_recorded(tokens: int, budget: int, says: str) -> None:
    """PyramidKV has no pyramid where the context is shorter than twice the budget beyond what is protected."""
    keep = Keep(scorer=SnapKV(window=8), budget=Amount(unit="tokens", value=budget), layers=Pyramid())
    jobs = [Question(owner=None, prefix=tuple(ids(tokens)), stack=s, held=(3,), max_new=1) for s in (Stack(keep=keep), Stack())]
    found = results(tiny_models.engine("llama"), jobs)
    assert [one.row.layer_budget for one in found if one.row] == [says, None]


def test_layers_that_were_asked_to_be_even_are() -> None:
    engine, stack = tiny_models.engine("llama"), conf_tree.stack("adakv", "keep.budget.value=0.5")
    row = engine.compress(engine.prefill(ids(100), stack.needs), stack)
    assert row.layer_budget == "uniform"
    assert len({n for layer in row.held() for n in layer}) > 1
