"""Merging in real caches: "never" is plain eviction bit for bit, merged stores are the oracles', seeds, bytes, every scorer."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.kv.evicting.merging import merged
from harness.kv.head_group import HeadGroup
from harness.kv.memory import predict
from harness.kv.sequence_cache import SequenceCache
from harness.kv.token_store import TokenStore
from harness.stages.codec.exact import Exact
from harness.stages.encoded import Heads
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.masked_reference import NAME as REFERENCE
from tests.support.masked_reference import MaskedCache
from tests.support.oracles.merged_rows import chances, merged_rows
from tests.support.tiny_models import ids, tiny

SEEN, BUDGET = 90, 40
MERGES = conf_tree.members("merge")
PHASES = ("prefill", "chunked", "always", "every_n")


@lru_cache
def engine(family: str = "llama") -> Engine:
    return tiny_models.engine(family)


@lru_cache
def prefix(family: str = "llama") -> Prefix:
    return engine(family).prefill(ids(SEEN), conf_tree.everything())


def stack(merge: str | None, phase: str = "prefill", keep: str = "h2o", *changes: str) -> Stack:
    made = None if merge is None else conf_tree.member("merge", merge, *changes)
    every = {"every": 3} if phase == "every_n" else {}
    return Stack(keep=conf_tree.keep(keep, BUDGET), merge=made, phase=phase, chunk=32, **every)


def read(one: Stack, family: str = "llama", seed: int = 3) -> SequenceCache:
    run = engine(family)
    if one.chunked:
        return run.read_chunked(ids(SEEN), [run.start(one, SEEN, seed)])[0][0]
    return run.compress(prefix(family), one, seed)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_merge_that_never_merges_is_plain_eviction_bit_for_bit(phase: str, family: str) -> None:
    """Numbers, bytes and logits, after the context and after every step; a merge that does merge changes the logits."""
    plain = read(stack(None, phase), family)
    nothing = [read(stack(name, phase, "h2o", "threshold=never"), family) for name in MERGES]
    merging = [read(stack(name, phase), family) for name in MERGES]
    for n in (7, 1, 1, 1):
        rows, logits = engine(family).feed([plain, *nothing, *merging], [ids(n, seed=n)] * (1 + 2 * len(MERGES)))
        plain, nothing, merging = rows[0], rows[1 : 1 + len(MERGES)], rows[1 + len(MERGES) :]
        for b, row in enumerate(nothing):
            assert torch.equal(logits[1 + b], logits[0])
            assert row.bytes() == plain.bytes() and row.merged == 0
            pairs = zip(row.head_groups, plain.head_groups, strict=True)
            same = [(a, b) for x, y in pairs for (_, a), (_, b) in zip(x.tensors(), y.tensors(), strict=True)]
            assert all(torch.equal(a, b) for a, b in same)
        for b, row in enumerate(merging):
            assert float((logits[1 + len(MERGES) + b] - logits[0]).abs().max()) > 1e-4, MERGES[b]
            assert row.merged > 0


def test_a_merged_cache_is_no_masked_one_and_an_unmerged_one_is() -> None:
    reference = MaskedCache(tiny("llama", REFERENCE), [None] * 3)
    reference.feed(ids(SEEN), None)
    rows = [read(stack("lookm", "prefill", "h2o", change)) for change in ("threshold=never", "threshold=-1")]
    expected = reference.feed(ids(5, seed=1), rows[0].kept_positions())
    _, logits = engine().feed(rows, [ids(5, seed=1)] * 2)
    scale = max(1.0, float(expected.abs().max()))
    assert float((logits[0] - expected).abs().max()) <= 1e-6 * scale
    assert float((logits[1] - expected).abs().max()) > 1e-3


def kept_of(before: SequenceCache, after: SequenceCache, layer: int, head: int) -> tuple[list[int], list[int]]:
    """Which of the tokens before stay and which go, by their place."""
    old = before.kept_positions()[layer][head].tolist()
    new = set(after.kept_positions()[layer][head].tolist())
    return [i for i, p in enumerate(old) if p in new], [i for i, p in enumerate(old) if p not in new]


def rows_of(cache: SequenceCache, layer: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    ((part, at),) = cache.slots[layer]
    return part.keys.read(torch.float32, at)[head], part.values.read(torch.float32, at)[head]


def check(before: SequenceCache, after: SequenceCache, name: str, tau: dict[tuple[int, int], float]) -> int:
    """Every layer and head of an eviction against the oracle; returns how many tokens the oracle merged."""
    total = 0
    for layer in range(3):
        for head in range(2):
            stay, go = kept_of(before, after, layer, head)
            assert go
            ((part, where),) = before.slots[layer]
            sums = None if part.sums_HN is None else part.sums_HN[where][head]
            draws = chances(before.seed, layer, head, before.kept_positions()[layer][head][go].tolist())
            wanted = merged_rows(name, rows_of(before, layer, head), stay, sums, draws, tau.get((layer, head)))
            total += wanted.given
            if wanted.tau is not None:
                tau[layer, head] = wanted.tau
            for x, one in zip(rows_of(after, layer, head), wanted.rows, strict=True):
                torch.testing.assert_close(x.double(), one, atol=2e-5, rtol=2e-5)
    return total


@pytest.mark.parametrize("name", ["cam", "d2o", "kvmerger", "lookm"])
def test_stores_after_every_eviction_are_those_of_the_oracle(name: str) -> None:
    """After the context and after single steps of a phase that goes on evicting; H2O chooses."""
    one, tau = stack(name, "always"), dict[tuple[int, int], float]()
    exact = engine().compress(prefix(), Stack(), 3)
    with_sums = SequenceCache(
        exact.shape, exact.stack, tuple(part.with_sums(prefix().stats) for part in exact.head_groups), exact.seen, seed=3
    )
    row = read(one)
    assert row.tokens_merged == check(with_sums, row, name, tau)
    for n in (1, 1, 4):
        with torch.inference_mode():
            (grown,), run, _ = engine()._forward([row], [ids(n, seed=n)])
        after = grown.evicted(grown.choices(run, 0))
        assert int(after.merged - row.merged) == check(grown, after, name, tau)
        row = after


def test_chances_come_from_the_seed_of_the_example() -> None:
    """Random sums stand for attention: what the tiny model's queries look at is nearly alike, and merged for certain."""
    g, whole = torch.Generator().manual_seed(0), prefix()
    stats = [replace(one, column_sums_HN=torch.rand(2, SEEN, generator=g) ** 2) for one in whole.stats]
    first, again, other = (whole.row.compress(stack("cam"), stats, seed, torch.float32) for seed in (3, 3, 4))
    values = [torch.cat([part.values.exact() for part in row.head_groups]) for row in (first, again, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert first.kept_positions()[0][0].tolist() == other.kept_positions()[0][0].tolist()


def test_what_a_merge_keeps_is_counted() -> None:
    """Six KV heads: D2O a number each, CaM the sums of what is held, which H2O shares; once over, neither keeps anything."""
    for merge, keep, state in (
        ("d2o", "knorm", 4 * 6), ("cam", "knorm", 4 * 6 * BUDGET), ("cam", "h2o", 4 * 6 * BUDGET),
        ("d2o", "h2o", 4 * 6 * (BUDGET + 1)), ("lookm", "knorm", 0), ("kvmerger", "knorm", 0),
    ):  # fmt: skip
        for phase in ("always", "prefill", "chunked"):
            row = read(stack(merge, phase, keep))
            held = row.bytes()
            assert held.allocated.get("state", 0) == (state if phase == "always" else 0), (merge, keep, phase)
            assert held.total == predict(row.stack, row.shape, BUDGET, 4, SEEN) == sum(held.allocated.values())


@pytest.mark.parametrize("name", conf_tree.members("keep"))
def test_every_scorer_and_split_merges_and_chooses_as_without(name: str) -> None:
    plain = read(stack(None, "prefill", name))
    for merge in MERGES:
        row = read(stack(merge, "prefill", name))
        assert row.merged > 0
        assert row.held() == plain.held()
        pairs = zip(row.kept_positions(), plain.kept_positions(), strict=True)
        assert all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))
        assert row.bytes() == plain.bytes()


def test_a_copy_for_reading_is_of_the_merged_numbers() -> None:
    merged = stack("lookm", "always")
    cached = Stack(keep=merged.keep, merge=merged.merge, phase="always", read="cached")
    rows = [read(merged), read(cached)]
    for n in (3, 1):
        rows, logits = engine().feed(rows, [ids(n, seed=n)] * 2)
        assert torch.equal(logits[0], logits[1])


def test_values_that_stand_for_many_tokens_stay_within_float16() -> None:
    heads, x = Heads((0,), 0, 1), torch.full((1, 4, 2), 60000.0).half()
    keys, values = (TokenStore.of(one, Exact(), None, heads) for one in (x / x, x))  # type: ignore[abstract]
    before, stay = HeadGroup(heads, keys, values), torch.tensor([[1]])
    kept, given = merged(before, before.take(stay, 4), stay, conf_tree.member("merge", "kvmerger"), 0, 4)
    assert kept.values.exact().tolist() == [[[65504.0, 65504.0]]] and int(given) == 3
