"""Merging at an eviction: what the tokens that go leave in those that stay, layer by layer, before anything is encoded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from harness.kv.head_group import HeadGroup
from harness.kv.token_store import TokenStore
from harness.stages.hashing import BITS, mix
from harness.stages.keep import Choice
from harness.stages.merge.base import Merge, Merged, Parting
from harness.stages.stack import Stack

SALT = 0x3E26E  # keeps chances apart from the scores of a random scorer


def taken(
    group: HeadGroup, choice: Choice, layers: tuple[int, ...], stack: Stack, seed_seen: tuple[int, int]
) -> tuple[HeadGroup, int]:
    """(the chosen tokens of some layers of a group, merged as the stack says; how many of the others were merged into them).

    seed_seen: of the example, and tokens seen so far.
    """
    kept = group.take(choice.index_HM, seed_seen[1], layers, choice.head)
    if stack.merge is None or not stack.merges:
        return kept, 0
    return merged(group, kept, choice.index_HM, stack.merge, *seed_seen)


def merged(before: HeadGroup, kept: HeadGroup, stay_HM: Tensor, merge: Merge, seed: int, seen: int) -> tuple[HeadGroup, int]:
    """(the head group after an eviction, with what its tokens receive from those that went; how many were merged).

    before: the group that `kept`, all heads of some layers or a single head, was taken from by the indices stay_HM.
    """
    n_H = torch.zeros((), dtype=torch.long, device=stay_HM.device)
    found: list[Merged] = []
    for i, layer in enumerate(kept.heads.layers):
        at = slice(i * kept.heads.each, (i + 1) * kept.heads.each)
        one = merge.merge(_parting(before, kept, layer, stay_HM[at], seed, seen))
        found.append(one)
        n_H = n_H + one.given_H.sum()
    took_HM = torch.cat([one.took_HM for one in found])
    keys = _with(kept.keys, took_HM, [one.k_HMD for one in found])
    values = _with(kept.values, took_HM, [one.v_HMD for one in found])
    states = [one.state_H for one in found if one.state_H is not None]
    return replace(kept, keys=keys, values=values, merge_H=torch.cat(states) if states else None), int(n_H)


def _parting(before: HeadGroup, kept: HeadGroup, layer: int, stay_HM: Tensor, seed: int, seen: int) -> Parting:
    """One layer of an eviction, as a merge sees it."""
    start = before.slot(layer).start - before.heads.start
    rows = slice(start + kept.heads.start, start + kept.heads.stop)
    pos_HN = before.positions(seen)[rows]
    goes_HN = torch.ones(pos_HN.shape, dtype=torch.bool, device=pos_HN.device).scatter_(1, stay_HM, False)
    go_HE = goes_HN.nonzero()[:, 1].view(len(pos_HN), -1)
    heads_H1 = torch.arange(kept.heads.start, kept.heads.stop, device=pos_HN.device)[:, None]
    hashed = mix(mix(torch.full_like(heads_H1, SALT), seed, layer), heads_H1)
    return Parting(
        k_HND=before.keys.read(torch.float32, rows),
        v_HND=before.values.read(torch.float32, rows),
        stay_HM=stay_HM,
        go_HE=go_HE,
        chance_HE=mix(hashed, pos_HN.gather(1, go_HE).long()).float() / (1 << BITS),
        sums_HN=None if before.sums_HN is None else before.sums_HN[rows],
        state_H=None if before.merge_H is None else before.merge_H[rows],
    )


def _with(store: TokenStore, took_HM: Tensor, new: list[Tensor | None]) -> TokenStore:
    """An exact store in which tokens that received something have their new numbers; itself where a side stays as it was."""
    x_HMD = [x for x in new if x is not None]
    if not x_HMD:
        return store
    old = store.exact()
    dtype = None if store.decoded_HND is None else store.decoded_HND.dtype
    return TokenStore.of(torch.where(took_HM[..., None], torch.cat(x_HMD).to(old.dtype), old), store.codec, dtype)
