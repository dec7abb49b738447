"""One head of an eviction by the oracle of each merge: the rows of all tokens that stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.kv.evicting.merging import SALT
from harness.stages.hashing import BITS, mix
from tests.support.oracles import merge as oracle


class MergedRows(NamedTuple):
    """rows: keys and values of the tokens that stay [M, D], fp64. given: how many of the others were merged. tau: D2O's."""

    rows: list[Tensor]
    given: int
    tau: float | None = None


def chances(seed: int, layer: int, head: int, positions: Sequence[int]) -> list[float]:
    """The uniform numbers of these tokens of a head."""
    hashed = mix(torch.tensor([SALT]), seed, layer, head)
    return [float(mix(hashed, position)) / (1 << BITS) for position in positions]


def merged_rows(
    name: str, exact: Sequence[Tensor], stay: Sequence[int], sums_N: Tensor | None, draws: Sequence[float], tau: float | None
) -> MergedRows:
    """exact: keys and values [N, D]. stay: which stay, by their place. draws: of those that go. tau: D2O's before, if any."""
    k, v = (x.double().tolist() for x in exact)
    kept = set(stay)
    go = [n for n in range(len(k)) if n not in kept]
    if name == "lookm":
        new_k, new_v, given = oracle.lookm(k, v, stay, go)
    elif name == "kvmerger":
        new_k, new_v, given = oracle.kvmerger(k, v, stay, go, 0.75)
    elif name == "d2o":
        tau = oracle.d2o_threshold(k, stay, go, tau)
        new_k, new_v, given = oracle.d2o(k, v, stay, go, tau)
    else:
        assert sums_N is not None
        new_k, (new_v, given) = {}, oracle.cam(v, sums_N.double().tolist(), stay, go, draws, 32)
    sides = ((k, new_k), (v, new_v))
    return MergedRows([torch.tensor([new.get(n, old[n]) for n in stay]).double() for old, new in sides], given, tau)
