"""Shares beside merges, codecs by layer and bases: stored heads and owners are treated as a model's own would be."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.calibrate.low_rank_bases import of_text
from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.memory import predict
from harness.kv.sequence_cache import SequenceCache
from harness.planning.sizes import size
from harness.stages.bases import Bases, Span, principal
from harness.stages.codec.base import Codec
from harness.stages.codec.by_layer import ByLayer
from harness.stages.codec.exact import Exact
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.codec.low_rank import LowRank
from harness.stages.codec.xkv import XKV
from harness.stages.rank import Rank
from harness.stages.share.adjacent_layers import AdjacentLayers
from harness.stages.share.minicache import MiniCache
from harness.stages.share.pooled_heads import PooledHeads
from harness.stages.share.sharing import Share
from harness.stages.share.upper_layers import UpperLayers
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.oracles import low_rank as oracle
from tests.support.oracles.merged_rows import chances, merged_rows
from tests.support.tiny_models import ids

CONTEXT, BUDGET = 90, 40
HEADS, D = 4, 32
MERGES = conf_tree.members("merge")
SHARES: dict[str, Share] = {"pooled": PooledHeads(groups=2), "cla": AdjacentLayers(), "yoco": UpperLayers()}
KINDS: dict[str, Codec] = {"int2": IntGroups(name="int2", bits=2, axis="token", residual=8), "int8": Int8(), "exact": Exact()}  # type: ignore[abstract]
MIXED = ByLayer(name="mixed", codecs=KINDS, layers=("int2", "exact", "int8"))


def run() -> Engine:
    return tiny_models.engine("llama", HEADS)


@lru_cache
def prefix() -> Prefix:
    return run().prefill(ids(CONTEXT), conf_tree.everything())


def compressed(stack: Stack) -> SequenceCache:
    return run().compress(prefix(), stack, seed=3)


def alone(rows: list[SequenceCache], n: int) -> tuple[list[SequenceCache], list[Tensor]]:
    """Each row after n tokens in a forward of its own, and its logits [V].

    With several threads the sums of a row in a batch depend on its place there.
    """
    grown, logits = list[SequenceCache](), list[Tensor]()
    for row in rows:
        (after,), last = run().feed([row], [ids(n, seed=n)])
        grown.append(after)
        logits.append(last[0])
    return grown, logits


def rows_of(row: SequenceCache, role: str, layer: int) -> Tensor:
    """What is stored of a layer, fp32 [H, N, D]; that of its owner where it has no store."""
    ((part, at),) = row.slots[layer]
    found: Tensor = getattr(part, role).read(torch.float32, at)
    return found


def held_is_predicted(row: SequenceCache, stack: Stack, n: int) -> None:
    held = row.bytes()
    assert held.total == sum(held.logical.values()) == predict(stack, run().shape, n, 4, row.seen, row.seen - CONTEXT)
    assert size(stack, run().shape, CONTEXT, 4, row.seen - CONTEXT).low == held.total


# --- merges ------------------------------------------------------------------------------------------------------


def merging(share: Share | None, merge: str | None, phase: str = "prefill", *changes: str) -> Stack:
    made = None if merge is None else conf_tree.member("merge", merge, *changes)
    return Stack(share=share, keep=conf_tree.keep("h2o", BUDGET), merge=made, phase=phase)


@pytest.mark.parametrize("phase", ["prefill", "always"])
@pytest.mark.parametrize("share", SHARES)
def test_a_merge_that_never_merges_is_plain_eviction_bit_for_bit(share: str, phase: str) -> None:
    stacks = [merging(SHARES[share], None, phase), *(merging(SHARES[share], name, phase, "threshold=never") for name in MERGES)]
    rows = [compressed(stack) for stack in stacks]
    for n in (5, 1, 1):
        rows, logits = alone(rows, n)
        assert all(torch.equal(one, logits[0]) for one in logits[1:])
        assert all(row.bytes() == rows[0].bytes() and row.merged == 0 for row in rows)


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("share", SHARES)
def test_what_is_merged_are_stored_heads(share: str, name: str) -> None:
    """The merge's oracle on the rows that the share stores; attention is the owner's own, or the mean over heads of a group."""
    stack = merging(SHARES[share], name)
    row, whole, total = compressed(stack), compressed(Stack(share=SHARES[share])), 0
    for layer in row.layout.stores(range(3)):
        exact = [rows_of(whole, role, layer) for role in ("keys", "values")]
        sums = row.layout.sums(prefix().stats[layer].column_sums_HN, layer)
        ((part, at),) = row.slots[layer]
        for h, positions in enumerate(part.positions(CONTEXT)[at]):
            stay = positions.tolist()
            draws = chances(3, layer, h, [n for n in range(CONTEXT) if n not in stay])
            found = merged_rows(name, [x[h] for x in exact], stay, None if sums is None else sums[h], draws, None)
            total += found.given
            for role, want in zip(("keys", "values"), found.rows, strict=True):
                torch.testing.assert_close(rows_of(row, role, layer)[h].double(), want, atol=2e-5, rtol=2e-5)
    assert row.tokens_merged == total
    assert total or name == "kvmerger", "random keys have hardly any runs of similar ones"


@pytest.mark.parametrize("phase", ["prefill", "always"])
@pytest.mark.parametrize("name", MERGES)
def test_bytes_of_merges_and_shares_are_the_formula_s(name: str, phase: str) -> None:
    for share in SHARES.values():
        stack = merging(share, name, phase)
        held_is_predicted(compressed(stack), stack, BUDGET)


def test_with_as_many_groups_as_heads_it_is_the_merge_alone() -> None:
    for name in MERGES:
        rows = [compressed(merging(share, name, "always")) for share in (None, PooledHeads(groups=HEADS))]
        for n in (4, 1):
            rows, logits = alone(rows, n)
            assert torch.equal(logits[0], logits[1])


# --- codecs by layer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "chunked", "always"])
def test_pooled_heads_have_codecs_by_layer(phase: str) -> None:
    """Each layer's store is that of its codec alone on the same pooled heads, as it grows; bytes are the formula's."""
    pool, keep = PooledHeads(groups=2), None if phase == "prefill" else conf_tree.keep("h2o", 60)
    mixed, alone = (Stack(share=pool, keep=keep, phase=phase, chunk=32, keys=MIXED, values=MIXED), {})

    def begun(stack: Stack) -> SequenceCache:
        if stack.chunked:
            return run().read_chunked(ids(CONTEXT), [run().start(stack, CONTEXT)])[0][0]
        return compressed(stack)

    row = begun(mixed)
    held_is_predicted(row, mixed, row.held()[0][0])
    assert row.codec_info()["keys"]["by_layer"] == list(MIXED.layers)
    if phase == "prefill":
        alone = {name: begun(replace(mixed, keys=KINDS[name], values=KINDS[name])) for name in KINDS}
    for step in range(2):
        for layer, name in enumerate(MIXED.layers):
            ((part, _),) = row.slots[layer]
            assert part.keys.codec.name == name and part.times == 2
            for role in ("keys", "values") if alone else ():
                if step == 0:  # later tokens were computed by layers that read other stores
                    assert torch.equal(rows_of(row, role, layer), rows_of(alone[name], role, layer))
        row = run().feed([row], [ids(3, seed=step)])[0][0]
    assert row.bytes().total == sum(row.bytes().logical.values())


def test_as_many_groups_as_heads_and_codecs_by_layer() -> None:
    rows = [compressed(Stack(share=share, keys=MIXED, values=MIXED)) for share in (None, PooledHeads(groups=HEADS))]
    for n in (4, 1):
        rows, logits = alone(rows, n)
        assert torch.equal(logits[0], logits[1])
    assert rows[0].bytes().total == rows[1].bytes().total


def test_rotated_parts_and_latents_have_codecs_by_layer() -> None:
    stack = Stack(share=conf_tree.stack("transmla").share, keys=MIXED, values=MIXED)
    row = compressed(stack)
    held_is_predicted(row, stack, CONTEXT)
    assert [row.slots[layer][0].head_group.values.codec.name for layer in range(3)] == list(MIXED.layers)


# --- bases -------------------------------------------------------------------------------------------------------


def low_rank(value: float, role: str) -> LowRank:
    """A basis of a text before RoPE, without the user cache."""
    moments = of_text(run(), [ids(80, seed=8)], Span(None, "text"), role, unrotated=role == "keys")
    found = {int(name.split(".")[1]): principal(moment) for name, moment in moments.items()}
    codec = LowRank(rank=Rank(value=value), of="weights")
    return codec.calibrated(Bases({i: one[0] for i, one in found.items()}, {}, {i: one[1] for i, one in found.items()}))


def side(x_HND: Tensor) -> Tensor:
    return x_HND.double().transpose(0, 1).flatten(1)


@pytest.mark.parametrize("share", ["cla", "yoco"])
def test_owners_have_their_own_bases_and_readers_read_through_them(share: str) -> None:
    half, whole = (
        Stack(share=SHARES[share], keys=low_rank(value, "keys"), values=low_rank(value, "values"), rope="pre")
        for value in (0.5, 1.0)
    )
    rows = [compressed(stack) for stack in (half, Stack(share=SHARES[share], rope="pre"))]
    for layer in range(3):
        owner = rows[0].layout.owners.get(layer, layer)
        for role in ("keys", "values"):
            codec = getattr(half, role)
            basis = codec.bases.by_layer[owner][0, :, : HEADS * D // 2].double()
            want = side(rows_of(rows[1], role, owner)) @ basis @ basis.T
            torch.testing.assert_close(side(rows_of(rows[0], role, layer)), want, atol=1e-5, rtol=1e-4)
    held_is_predicted(rows[0], half, CONTEXT)
    rows = [compressed(whole), rows[1]]
    for n in (5, 1):
        rows, logits = run().feed(rows, [ids(n, seed=n)] * 2)
        torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("share", "layers"), [("pooled", 3), ("cla", 2), ("yoco", 2)])
def test_xkv_decomposes_what_is_stored(share: str, layers: int) -> None:
    codec = XKV(rank=Rank(value=0.25), layers=layers)
    stack = Stack(share=SHARES[share], keys=codec, values=codec, rope="pre")
    row, whole = compressed(stack), compressed(Stack(share=SHARES[share], rope="pre"))
    stores = row.layout.stores(range(3))
    for role in ("keys", "values"):
        sides = [side(rows_of(whole, role, layer)) for layer in stores]
        rank = D // 4 * layers * (len(rows_of(whole, role, 0)))
        for layer, want in zip(stores, oracle.xkv(sides, rank), strict=True):
            torch.testing.assert_close(side(rows_of(row, role, layer)), want, atol=1e-4, rtol=1e-4)
    held_is_predicted(row, stack, CONTEXT)
    held_is_predicted(run().feed([row], [ids(4)])[0][0], stack, CONTEXT + 4)


REFUSED: dict[str, tuple[Share, dict[str, Any]]] = {
    "layers that share a store cannot have codecs of their own; legal are one codec for all layers, or heads that share": (
        AdjacentLayers(), {"keys": MIXED},
    ),
    "its basis is of the model's own layers and heads, and others are stored; legal are xkv": (
        PooledHeads(groups=2), {"values": LowRank(rank=Rank(value=0.5), of="weights")},
    ),
    "and others are stored; legal are codecs that encode each head by itself": (
        MiniCache(), {"keys": XKV(rank=Rank(value=0.5), layers=3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_the_rest_is_refused_with_what_is_legal(said: str) -> None:
    share, parts = REFUSED[said]
    with pytest.raises(UserError, match=said):
        Stack(share=share, **parts)


def test_an_order_of_layers_that_is_measured_is_of_single_heads() -> None:
    with pytest.raises(UserError, match=r"measured on single heads, .*; legal are keys\.layers=first, last or a list"):
        Stack(share=PooledHeads(), keys=conf_tree.member("codec", "kvtuner_3bit"))


def test_xkv_needs_whole_groups_of_layers_with_stores() -> None:
    codec = XKV(rank=Rank(value=0.5), layers=3)
    with pytest.raises(UserError, match=r"codec\.layers=3 is not possible with 2 layers"):
        compressed(Stack(share=AdjacentLayers(), keys=codec))
