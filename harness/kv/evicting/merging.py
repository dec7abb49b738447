"""An eviction: the chosen tokens stay, and what the others leave in them is merged, layer by layer, before any encoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.kv.head_group import HeadGroup
from harness.kv.token_store import TokenStore
from harness.stages.hashing import BITS, mix
from harness.stages.keep import Choice
from harness.stages.merge.parting import Merge, Merged, Parting, acts
from harness.stages.rounding import in_range

SALT = 0x3E26E  # keeps chances apart from the scores of a random scorer


def after_eviction(
    groups: Sequence[HeadGroup], choices: Sequence[Choice], merge: Merge | None, seed: int, seen: int
) -> tuple[list[HeadGroup], Tensor | int]:
    """(head groups with the chosen tokens only, in layers that have a Choice; how many of the others were merged into them).

    seed: of the example. seen: tokens so far.
    """
    found: list[HeadGroup] = []
    given: Tensor | int = 0
    for group in groups:
        left = list(group.heads.layers)
        for choice in choices:
            mine = tuple(layer for layer in choice.layers if layer in group.heads.layers)
            if mine:
                kept = group.take(choice.index_HM, seen, mine, choice.head, choice.ends)
                if merge is not None and acts(merge):
                    kept, more = merged(group, kept, choice.index_HM, merge, seed, seen)
                    given = given + more
                found.append(kept)
                left = [layer for layer in left if layer not in mine]
        if left:
            found.append(group.rest(tuple(left)))
    return found, given


def merged(before: HeadGroup, kept: HeadGroup, stay_HM: Tensor, merge: Merge, seed: int, seen: int) -> tuple[HeadGroup, Tensor]:
    """(the head group after an eviction, with what its tokens receive from those that went; how many were merged, 0-d).

    before: the group that `kept`, all heads of some layers or a single head, was taken from by the indices stay_HM.
    """
    n_H = torch.zeros((), dtype=torch.long, device=stay_HM.device)
    found: list[Merged] = []
    for i, layer in enumerate(kept.heads.layers):
        at = slice(i * kept.heads.each, (i + 1) * kept.heads.each)
        one = merge.merge(_parting(before, kept, layer, stay_HM[at], seed, seen).for_merge(merge))
        found.append(one)
        n_H = n_H + one.given_H.sum()
    took_HM = torch.cat([one.took_HM for one in found])
    keys = _with(kept.keys, took_HM, [one.k_HMD for one in found])
    values = _with(kept.values, took_HM, [one.v_HMD for one in found])
    states = [one.state_H for one in found if one.state_H is not None]
    return replace(kept, keys=keys, values=values, merge_H=torch.cat(states) if states else None), n_H


def _parting(before: HeadGroup, kept: HeadGroup, layer: int, stay_HM: Tensor, seed: int, seen: int) -> Parting:
    """One layer of an eviction, as a merge sees it."""
    start = before.slot(layer).start - before.heads.start
    rows = slice(start + kept.heads.start, start + kept.heads.stop)
    pos_HN = before.positions(seen)[rows]
    h, n = pos_HN.shape
    places_HN = torch.arange(n, device=pos_HN.device).repeat(h, 1).scatter_(1, stay_HM, n)
    go_HE = places_HN.topk(n - stay_HM.shape[1], dim=1, largest=False).values  # in order, and the host need not wait
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
    merged_HMD, _ = in_range(torch.cat(x_HMD), old.dtype)  # values of many tokens may be beyond float16
    return TokenStore.of(torch.where(took_HM[..., None], merged_HMD, old), store.codec, dtype)
