"""Parts that write into what they are shown change nothing for others: merges and codecs see copies, as scorers do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.engine.engine import Engine
from harness.kv.sequence_cache import SequenceCache
from harness.stages.codec.think import Think
from harness.stages.merge.parting import Merge, Merged, Parting
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.tiny_models import ids


@dataclass(frozen=True)
class Vandal(Merge):
    """Merges nothing, and writes into all it sees."""

    keeps_sums = True
    seen: list[Parting] = field(default_factory=list, compare=False)

    @property
    def keeps_number(self) -> bool:
        return True

    def merge(self, parting: Parting) -> Merged:
        self.seen.append(parting)
        none = torch.zeros(parting.stay_HM.shape, dtype=torch.bool)
        kept = parting.staying(parting.k_HND)
        for one in (parting.k_HND, parting.v_HND, parting.stay_HM, parting.go_HE, parting.sums_HN, parting.state_H):
            if one is not None:
                one.zero_()
        return Merged(none, none.sum(1), k_HMD=kept, state_H=torch.ones(len(kept)))


class Modest(Vandal):
    keeps_sums = False


@dataclass(frozen=True, kw_only=True)
class Blunt(Think):
    """Chooses channels as ThinK does, then writes into the queries and keys that it was shown."""

    def observing(self, queries_HGWD: Tensor, keys_HND: Tensor) -> Think:
        found = super().observing(queries_HGWD, keys_HND)
        queries_HGWD.zero_()
        keys_HND.zero_()
        return found


def alike(one: SequenceCache, other: SequenceCache) -> bool:
    pairs = zip(one.head_groups, other.head_groups, strict=True)
    stores = ((x, y) for a, b in pairs for x, y in ((a.keys, b.keys), (a.values, b.values)))
    kept = zip(one.kept_positions(), other.kept_positions(), strict=True)
    same = all(torch.equal(x, y) for a, b in kept for x, y in zip(a, b, strict=True))
    return same and all(torch.equal(x.read(torch.float32), y.read(torch.float32)) for x, y in stores)


def test_a_merge_or_a_codec_that_writes_changes_nothing_for_other_stacks() -> None:
    """Found by: attention sums and queries of the shared prefill were handed to merges and codecs as they are."""
    engine: Engine = tiny_models.engine("llama")
    keep = conf_tree.keep("h2o", 40)
    plain, think = Stack(keep=keep, phase="always"), replace(conf_tree.stack("think"), keys=Blunt(recent=4, queries=8))
    snap = Stack(keep=replace(conf_tree.keep("snapkv", 40), recent=8))
    needs = plain.needs | think.needs | snap.needs
    alone = [engine.compress(engine.prefill(ids(90), needs), one) for one in (plain, snap)]
    shared = engine.prefill(ids(90), needs)
    engine.compress(shared, Stack(keep=keep, merge=Vandal(), phase="always"))
    engine.compress(shared, think)
    for one, stack in zip(alone, (plain, snap), strict=True):
        assert alike(one, engine.compress(shared, stack))
    exact = engine.prefill(ids(90))
    assert alike(exact.row, shared.row)


def test_forks_of_one_cache_keep_the_numbers_of_a_merge_that_writes() -> None:
    engine: Engine = tiny_models.engine("llama")
    stack = Stack(keep=conf_tree.keep("h2o", 40), merge=Vandal(), phase="always")
    row = engine.compress(engine.prefill(ids(90), stack.needs), stack)
    before = [group.merge_H.clone() for group in row.head_groups if group.merge_H is not None]
    engine.feed([row], [ids(1)])
    assert before and all(
        torch.equal(x, group.merge_H) for x, group in zip(before, row.head_groups, strict=True) if group.merge_H is not None
    )


def test_a_merge_that_asks_for_no_sums_sees_none() -> None:
    """Found by: a merge saw the sums of its scorer, and so another thing beside another scorer."""
    engine: Engine = tiny_models.engine("llama")
    merge = Modest()
    engine.compress(
        engine.prefill(ids(90), conf_tree.everything()), Stack(keep=conf_tree.keep("h2o", 40), merge=merge, phase="always")
    )
    assert merge.seen and all(one.sums_HN is None for one in merge.seen)
