"""Byte sums of known small models, to the byte, as the real engine measures them (fp16 cache)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import pytest
import torch

from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.kv.head_group import HeadGroup
from harness.kv.memory import measure, predict
from harness.kv.sequence_cache import SequenceCache
from harness.kv.shape import LayerShape, ModelShape
from harness.kv.token_store import TokenStore
from harness.stages.budget import Amount
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.encoded import Heads
from harness.stages.keep import Keep
from harness.stages.protocols import Stats
from harness.stages.score.h2o import H2O
from harness.stages.stack import Stack
from harness.types import KV
from tests.support import conf_tree
from tests.support.oracles import nbytes
from tests.support.tiny_models import build, ids, tiny_a, tiny_g

NEEDS = conf_tree.everything()


@lru_cache
def engine(name: str) -> Engine:
    return Engine(build(tiny_a() if name == "A" else tiny_g(), "kv_harness"), torch.float16)


@lru_cache
def prefix(name: str, tokens: int) -> Prefix:
    return engine(name).prefill(ids(tokens), NEEDS)


def compressed(stack: Stack, name: str = "A", tokens: int = 256) -> SequenceCache:
    return engine(name).compress(prefix(name, tokens), stack)


def nonzero(sizes: Mapping[str, int]) -> dict[str, int]:
    return {kind: size for kind, size in sizes.items() if size}


def int4(residual: int) -> Stack:
    return Stack(keys=IntGroups(residual=residual), values=IntGroups(residual=residual))


def test_tiny_a_uncompressed() -> None:
    assert compressed(Stack()).bytes().total == 524_288
    assert engine("A").shape.full_bytes(256, 2) == 524_288


@pytest.mark.parametrize(("residual", "total"), [(0, 163_840), (32, 208_896)])
def test_tiny_a_in_four_bits(residual: int, total: int) -> None:
    held = compressed(int4(residual)).bytes()
    assert held.total == total
    wanted = {k: 4 * v for k, v in nbytes.int4_groups(2, 256, 64, 32, residual).items() if v}
    assert nonzero(held.logical) == nonzero(held.allocated) == wanted


def test_tiny_a_evicted_to_64_rows() -> None:
    """Case 23: KV heads are stored, not query heads. Positions and scores are counted beside the tokens."""
    row = compressed(Stack(keep=conf_tree.keep("h2o", 64)))
    assert {t.shape[0] for part in row.head_groups for _, t in part.tensors()} == {4 * 2}  # layers x KV heads
    assert row.bytes().allocated == {"payload": 131_072, "positions": 2_048}
    always = compressed(Stack(keep=conf_tree.keep("h2o", 64), phase="always"))
    assert always.bytes().allocated == {"payload": 131_072, "positions": 2_048, "state": 2_048}
    int8 = compressed(Stack(keep=conf_tree.keep("h2o", 64), phase="always", keys=Int8(), values=Int8()))
    assert int8.bytes().allocated == {"payload": 65_536, "metadata": 2_048, "positions": 2_048, "state": 2_048}


def test_tiny_g_counts_windows_and_the_global_layer() -> None:
    """Case 34: five layers hold window - 1 tokens, one holds all; past the window only it grows, 256 bytes a token."""
    sizes = {}
    for tokens in (32, 63, 64, 65, 512):
        row = compressed(Stack(), "G", tokens)
        sizes[tokens] = row.bytes().total
        assert sizes[tokens] == engine("G").shape.full_bytes(tokens, 2)
        assert row.held() == [[min(tokens, 63)]] * 5 + [[tokens]]
    assert sizes[512] == 211_712
    assert sizes[32] == 6 * 32 * 256
    assert sizes[64] - sizes[63] == sizes[65] - sizes[64] == 256


def test_case_28_only_the_global_layer_of_tiny_g_is_compressed() -> None:
    row = compressed(Stack(keep=conf_tree.keep("h2o", 64), phase="always", keys=Int8(), values=Int8()), "G", 300)
    assert engine("G").shape.full_layers == (5,)
    assert row.held() == [[63]] * 5 + [[64]]
    assert [p[0].tolist() for p in row.kept_positions()[:5]] == [list(range(237, 300))] * 5
    assert row.bytes().total == 5 * 63 * 256 + 64 * (2 * 64 + 2 * 2 + 4 + 4)
    assert row.touched() == 300 - 64 + 64


def test_case_25_rows_of_the_answer_join_the_store() -> None:
    """525 tokens cut to a fifth, 200 more: 105 + 200 tokens at the end."""
    run, n = engine("A"), 525
    row = run.compress(run.prefill(ids(n), NEEDS), conf_tree.stack("knorm", "keep.budget.value=0.2"))
    assert row.held() == [[105, 105]] * 4
    start = row.bytes().total
    (row,), _ = run.feed([row], [ids(200, seed=1)])
    assert row.held() == [[305, 305]] * 4
    assert row.bytes().total == 305 * 4 * 2 * (256 + 4)
    assert row.bytes().total > start
    assert row.seen == 725


# --- the worked example: 32 heads of 128, 1,000 tokens, one layer ---------------------------------------------------


def test_worked_example() -> None:
    shape = ModelShape((LayerShape(32, 128, 128),), 32)
    assert shape.full_bytes(1000, 2) == 16_384_000
    x = torch.randn(32, 1000, 128, generator=torch.Generator().manual_seed(0)).half()
    part = HeadGroup(
        Heads((0,), 0, 32),
        TokenStore.of(x, conf_tree.member("codec", "exact"), None),
        TokenStore.of(x.clone(), Stack().values, None),
    )
    row = SequenceCache(shape, Stack(), (part,), 1000)
    sums = torch.rand(32, 1000, generator=torch.Generator().manual_seed(1))
    keep = Keep(scorer=H2O(), sinks=4, recent=32, budget=Amount(unit="tokens", value=64))
    stats = Stats(sums, None, 1.0)
    evicted = row.compress(Stack(keep=keep), [stats], 0, torch.float16)
    assert evicted.bytes().allocated["payload"] == 1_048_576
    stack = Stack(keep=keep, phase="always", keys=Int8(), values=Int8())
    coded = row.compress(stack, [stats], 0, torch.float16)
    assert nonzero(coded.bytes().allocated) == {"payload": 524_288, "metadata": 8_192, "positions": 8_192, "state": 8_192}
    assert coded.bytes().total == predict(stack, shape, 64, 2, 1000) == 548_864


def test_bytes_a_token_of_known_models() -> None:
    sizes = {(32, 32): 524_288, (80, 64): 2_621_440, (80, 8): 327_680}
    for (layers, heads), size in sizes.items():
        assert ModelShape((LayerShape(heads, 128, 128),) * layers, 64).full_bytes(1, 2) == size
    assert ModelShape((LayerShape(3, 64, 64),) * 30, 9).full_bytes(1, 2) == 23_040


# --- measured == predicted, every member of conf/compress ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", conf_tree.members("compress"))
def test_measured_bytes_are_the_storages_and_the_prediction(name: str, dtype: torch.dtype) -> None:
    run = Engine(build(tiny_a(), "kv_harness"), dtype)
    whole = run.prefill(ids(150), NEEDS)
    for fraction in (0.25, 0.4, 0.5, 1.0):
        stack = conf_tree.stack(name)
        if stack.keep is not None:
            stack = conf_tree.stack(name, f"keep.budget.value={fraction}")
        row = run.compress(whole, stack)
        for step in (0, 1, 40, 1):
            if step:
                (row,), _ = run.feed([row], [ids(step, seed=step)])
            held = row.bytes()
            tensors = [t for part in row.head_groups for _, t in part.tensors()]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            assert held.total == sum(storages.values())
            assert nonzero(held.logical) == nonzero(held.allocated)
            if len(sizes := {n for layer in row.held() for n in layer}) == 1:
                assert held.total == predict(stack, run.shape, sizes.pop(), dtype.itemsize, row.seen, row.seen - 150), (
                    fraction,
                    step,
                )
            else:
                assert held.total == ragged_bytes(row, dtype.itemsize), (fraction, step)


def ragged_bytes(row: SequenceCache, itemsize: int) -> int:
    """Exact tokens of layers and heads that hold different numbers: K and V, and positions where the layer lost a token."""
    assert not row.stack.keys.lossy and not row.stack.values.lossy and not row.stack.keeps_state
    return sum(n * 2 * 64 * itemsize + (4 * n if min(layer) < row.seen else 0) for layer in row.held() for n in layer)


def test_bytes_rise_with_the_budget_in_every_stack() -> None:
    for name in conf_tree.members("compress"):
        if conf_tree.stack(name).keep is None:
            continue
        stacks = [conf_tree.stack(name, f"keep.budget.value={f}") for f in (0.2, 0.4, 0.6, 0.8)]
        sizes = [compressed(stack).bytes().total for stack in stacks]
        assert sizes == sorted(sizes), name
        assert len(set(sizes)) == len(sizes) or name == "duo", name  # its retrieval heads keep everything from 0.6 on
        assert sizes[-1] < 524_288, name


def test_case_24_logical_and_allocated_agree_after_eviction_with_ragged_heads() -> None:
    class Heads:
        def split(self, tokens: int, scores_HM: torch.Tensor, layer: int) -> list[int]:
            return [tokens + 10, tokens - 10]

    row = compressed(Stack(keep=conf_tree.keep("knorm", 64, heads=Heads())))
    assert row.held() == [[74, 54]] * 4
    held = row.bytes()
    assert nonzero(held.logical) == nonzero(held.allocated)
    assert held.total == 131_072 + 2_048


def test_a_view_of_a_larger_tensor_is_counted_as_what_it_holds() -> None:
    big = torch.zeros(2, 1000, 64, dtype=torch.float16)
    kv = KV(big[:, :10], big[:, :10], 0)
    held = measure([("payload", kv.k_HND)])
    assert held.logical["payload"] == 2 * 10 * 64 * 2
    assert held.allocated["payload"] == 2 * 1000 * 64 * 2
