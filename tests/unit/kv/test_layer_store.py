"""Stores of one layer: never changed in place, tokens copied when kept, tails bounded, bytes equal what the storages hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.errors import UserError
from harness.kv.head_group import HeadGroup, Slot, with_new
from harness.kv.memory import measure
from harness.kv.token_store import TokenStore
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.encoded import Heads, TokenIndex
from harness.types import KV
from tests.support import conf_tree

D = 32
BITS2 = IntGroups(name="int2", bits=2, group=32, residual=32, axis="channel")
PER_TOKEN: dict[str, Codec] = {"exact": Exact(), "int8": Int8(), "int4": IntGroups(axis="token", residual=4)}


def vectors(n: int, heads: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(heads, n, D, generator=torch.Generator().manual_seed(seed))


def new(n: int, start: int, heads: int = 2) -> KV:
    return KV(vectors(n, heads, start), vectors(n, heads, start + 1000), start)


def head_group(n: int, codec: Codec | None = None, heads: int = 2) -> HeadGroup:
    kv, codec = new(n, 0, heads), codec or Exact()
    return HeadGroup(Heads((0,), 0, heads), TokenStore.of(kv.k_HND, codec, None), TokenStore.of(kv.v_HND, codec, None))


def content(found: HeadGroup) -> list[Tensor]:
    return [t.clone() for _, t in found.tensors()]


# --- cases 8 and 9 -----------------------------------------------------------------------------------------------


def test_case_8_tokens_that_aged_at_decode_are_really_quantized() -> None:
    x = vectors(200)
    store = TokenStore.of(x[:, :32].clone(), BITS2, None)
    for t in range(32, 200):
        store = store.append(x[:, t : t + 1].clone())
        assert store.n_encoded % 32 == 0
        assert store.tail_HND.shape[1] < 64
    read = store.read(torch.float32)
    assert store.n_encoded == 160
    assert torch.equal(read[:, 160:], x[:, 160:])
    error = (read[:, :160] - x[:, :160]).abs()
    assert float(error.mean()) > 0.2  # 2 bits: a step is about 1.3
    assert bool((error.amax((0, 2)) > 0).all())
    held = measure(store.tensors())
    payload, metadata = BITS2.nbytes(2, 160, D, 4)
    assert held.total == payload + metadata + 2 * 40 * D * 4
    assert held.allocated == held.logical == {"payload": payload, "metadata": metadata, "tail": 2 * 40 * D * 4}


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("calls", [[1] * 500, [100, 40, *[1] * 50], [33] * 9, [64, 64, 1, 63], [300], [31, 1, 1, 31, 1]])
def test_case_9_the_exact_tail_stays_below_residual_plus_group(calls: list[int], axis: str) -> None:
    codec = IntGroups(bits=4, group=32, residual=32, axis=axis)
    x, at = vectors(sum(calls)), 0
    store: TokenStore | None = None
    for n in calls:
        step = x[:, at : at + n].clone()
        store, at = TokenStore.of(step, codec, None) if store is None else store.append(step), at + n
        tail = store.tail_HND.shape[1]
        assert tail < 64 if axis == "channel" else tail <= 32
        assert tail >= min(32, at)
        assert store.n == at
        assert store.tail_HND.untyped_storage().nbytes() == 2 * tail * D * 4


def test_case_10_the_residual_is_exact_after_prefill() -> None:
    codec = IntGroups(bits=4, group=32, residual=128, axis="channel")
    x = vectors(300)
    assert torch.equal(TokenStore.of(x[:, :100].clone(), codec, None).read(torch.float32), x[:, :100])
    store = TokenStore.of(x, codec, None)
    assert store.n_encoded == 160  # the most whole groups that leave at least 128 exact
    assert torch.equal(store.read(torch.float32)[:, -128:], x[:, -128:])


# --- nothing in place, nothing held by a view --------------------------------------------------------------------


@pytest.mark.parametrize("name", conf_tree.members("codec"))
def test_stores_are_never_changed_in_place(name: str) -> None:
    codec = conf_tree.member("codec", name).for_role("keys")
    store = head_group(70, codec)
    before = content(store)
    grown = store
    for start in (70, 75, 110):
        grown = grown.append(new(5 if start == 70 else 35, start), None)
    grown.keys.read(torch.float32)
    if codec.flush == 1 and not codec.residual and not codec.joint:
        store.take(torch.arange(0, 70, 2).expand(2, -1), 70)
    assert all(torch.equal(a, b) for a, b in zip(content(store), before, strict=True))
    assert grown.n == 70 + 5 + 35 + 35


@pytest.mark.parametrize("codec", PER_TOKEN.values(), ids=PER_TOKEN)
def test_taken_rows_are_the_rows_with_their_positions_and_hold_only_their_own_bytes(codec: Codec) -> None:
    store = head_group(50, codec).append(new(10, 50), None)
    index = torch.tensor([[0, 7, 30, 41, 56, 57, 58, 59], [1, 2, 3, 51, 56, 57, 58, 59]])
    kept = store.take(index, 60)
    whole = store.keys.read(torch.float32)
    for h in range(2):
        assert torch.equal(kept.keys.read(torch.float32)[h], whole[h, index[h]])
    assert torch.equal(kept.positions(60), index.int())
    held = measure(kept.tensors())
    assert held.logical == {k: held.allocated.get(k, 0) for k in held.logical}
    n_tail = codec.residual
    exact = 2 * 2 * n_tail * D * 4
    assert held.total == 2 * sum(codec.nbytes(2, 8 - n_tail, D, 4)) + exact + 2 * 8 * 4


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_exact_tokens_are_read_as_they_lie_in_the_dtype_of_attention(stored: torch.dtype) -> None:
    x = vectors(40, heads=4).to(stored)
    store = TokenStore.of(x[:, :30].clone(), Exact(), None).append(x[:, 30:35].clone()).append(x[:, 35:].clone())
    group = HeadGroup(Heads((0, 1), 0, 2), store, store)
    fresh = vectors(3, seed=1)
    for read in with_new([Slot(group, slice(2, 4))], fresh[None], fresh[None]):
        assert read.dtype == fresh.dtype and read.is_contiguous()
        assert torch.equal(read[0], torch.cat((x[2:].float(), fresh), 1))


def test_heads_with_their_own_number_of_rows_hold_only_their_own_bytes() -> None:
    store = head_group(50)
    groups = [store.take(torch.arange(n)[None] * 2, 50, head=h) for h, n in enumerate((5, 20))]
    held = measure(pair for p in groups for pair in p.tensors())
    assert held.total == held.logical["payload"] + held.logical["positions"] == 25 * (2 * D * 4 + 4)

    def one(n: int, start: int, head: int) -> KV:
        kv = new(n, start)
        return KV(kv.k_HND[head : head + 1], kv.v_HND[head : head + 1], start)

    grown = [p.append(one(3, 50, h), None).append(one(1, 53, h), None) for h, p in enumerate(groups)]
    held = measure(pair for p in grown for pair in p.tensors())
    assert held.total == (25 + 2 * 4) * (2 * D * 4 + 4)
    assert grown[1].positions(54)[0].tolist() == [*range(0, 40, 2), 50, 51, 52, 53]
    assert torch.equal(grown[1].keys.read(torch.float32)[0, 20:23], new(3, 50).k_HND[1])


def test_the_newest_rows_of_a_sliding_layer_release_the_others() -> None:
    store = head_group(100).newest(15)
    assert measure(store.tensors()).total == 2 * 2 * 15 * D * 4
    assert torch.equal(store.keys.read(torch.float32), new(100, 0).k_HND[:, -15:])
    assert store.positions(100)[0].tolist() == list(range(85, 100))


def test_sums_follow_their_rows() -> None:
    store = head_group(6)
    store = HeadGroup(Heads((0,), 0, 2), store.keys, store.values, None, torch.arange(12.0).view(2, 6))
    kept = store.take(torch.tensor([[0, 5], [2, 3]]), 6)
    assert kept.sums_HN is not None
    assert kept.sums_HN.tolist() == [[0, 5], [8, 9]]
    grown = kept.append(new(1, 6), torch.tensor([[1.0, 2.0, 0.5], [0.0, 1.0, 0.25]]))
    assert grown.sums_HN is not None
    assert grown.sums_HN.tolist() == [[1, 7, 0.5], [8, 10, 0.25]]


# --- exact first tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [[90], [1] * 90, [3, 2, 60, 25], [4, 86]])
@pytest.mark.parametrize("view", [None, torch.float32])
def test_the_first_rows_stay_exact_for_good(calls: list[int], view: torch.dtype | None) -> None:
    """Whatever the calls were, tokens 0 to 3 are never encoded and the codes of the rest are those without sinks before them."""
    with_sinks, without = (IntGroups(axis="channel", residual=8, sinks=s) for s in (4, 0))
    x, at, store = vectors(90), 0, None
    for n in calls:
        step = x[:, at : at + n].clone()
        store, at = TokenStore.of(step, with_sinks, view) if store is None else store.append(step), at + n
    assert store is not None
    assert store.n == 90
    read = store.read(torch.float32)
    assert torch.equal(read[:, :4], x[:, :4])
    assert torch.equal(read[:, 4:], TokenStore.of(x[:, 4:].clone(), without, None).read(torch.float32))
    assert not torch.equal(read[:, 4:], x[:, 4:])
    assert torch.equal(store.read(torch.float32, slice(1, 2)), read[1:2])
    held = measure(store.tensors())
    n_encoded = (90 - 4 - 8) // 32 * 32
    assert held.allocated["tail"] == 2 * (90 - n_encoded) * D * 4
    assert held.logical == held.allocated


def test_exact_first_rows_are_never_evicted() -> None:
    store = TokenStore.of(vectors(50), IntGroups(axis="token", residual=8, sinks=4), None)
    kept = take(store, [0, 1, 2, 3, 7, 20, *range(42, 50)])
    whole = store.read(torch.float32)
    assert torch.equal(kept.read(torch.float32), whole[:, [0, 1, 2, 3, 7, 20, *range(42, 50)]])
    with pytest.raises(UserError, match=r"exact first tokens of codec int4: raise keep\.sinks"):
        take(store, [0, 1, 2, 5, 7, *range(42, 50)])


# --- decoded views -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", PER_TOKEN.values(), ids=PER_TOKEN)
def test_a_cached_view_reads_the_same_and_is_counted_as_scratch(codec: Codec) -> None:
    plain, cached = TokenStore.of(vectors(50), codec, None), TokenStore.of(vectors(50), codec, torch.float32)
    for n in (1, 30, 7):
        plain, cached = plain.append(vectors(n, seed=n)), cached.append(vectors(n, seed=n))
        assert torch.equal(plain.read(torch.float32), cached.read(torch.float32))
    index = torch.arange(0, plain.n - codec.residual, 3)
    index = torch.cat((index, torch.arange(plain.n - codec.residual, plain.n))).expand(2, -1)
    chosen = TokenIndex(index)
    plain, cached = plain.take(index, chosen), cached.take(index, chosen)
    assert torch.equal(plain.read(torch.float32), cached.read(torch.float32))
    held = measure(cached.tensors())
    assert held.allocated["scratch"] == 2 * cached.n_encoded * D * 4
    assert held.total - held.allocated["scratch"] == measure(plain.tensors()).total


def test_reading_gives_a_tensor_of_its_own() -> None:
    store = TokenStore.of(vectors(40).bfloat16(), Int8(), None)
    store.read(torch.float32).zero_()
    assert bool(store.read(torch.float32).any())


@pytest.mark.parametrize("newest", [True, False])
def test_rows_of_an_older_and_a_newer_tensor_are_chosen_together(newest: bool) -> None:
    old, new = vectors(40), vectors(3, seed=9)
    index = torch.tensor([[0, 7, 39, 40, 41, 42], [1, 2, 38, 40, 41, 42]])
    if not newest:  # one head drops one of the new tokens
        index = torch.tensor([[0, 7, 39, 40, 41, 42], [1, 2, 37, 38, 40, 42]])
    whole = torch.cat((old, new), 1)
    chosen = TokenIndex(index).of(old, new)
    assert torch.equal(chosen, torch.stack([whole[h, index[h]] for h in range(2)]))
    assert chosen.untyped_storage().nbytes() == chosen.numel() * 4


def take(store: TokenStore, index: list[int]) -> TokenStore:
    both = torch.tensor([index] * 2)
    return store.take(both, TokenIndex(both))


def test_rows_that_would_cut_the_exact_tail_are_refused() -> None:
    store = TokenStore.of(vectors(50), IntGroups(axis="token", residual=8), None)
    assert take(store, [1, *range(42, 50)]).n == 9
    for index in ([1, 2, 3, *range(44, 50)], [47, 48, 49], list(range(8))):
        with pytest.raises(UserError, match=r"evict from the 8 exact newest tokens of codec int4: raise keep\.recent"):
            take(store, index)
