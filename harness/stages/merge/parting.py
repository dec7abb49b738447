"""The merge protocol: what becomes of the tokens that go. Merged numbers join kept tokens, which stay where they were.

To add one: one class that inherits from `Merge`, one YAML in `conf/merge` with its `_target_`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from torch import Tensor

from harness.errors import require
from harness.stages.protocols import Needs

NEVER = "never"


@dataclass(frozen=True)
class Parting:
    """Tokens of H KV heads at an eviction, fp32, before anything is encoded: M of N stay, E = N - M go, both in position order.

    stay_HM, go_HE: their indices into the N stored tokens.
    sums_HN: attention that each token received so far (`Needs.column_sums`), if the merge asks for it.
    state_H: what this merge returned at the last eviction of these heads; None at the first.
    chance_HE: uniform random numbers in [0, 1), from the example's seed, layer, head and position.
    """

    k_HND: Tensor
    v_HND: Tensor
    stay_HM: Tensor
    go_HE: Tensor
    chance_HE: Tensor
    sums_HN: Tensor | None = None
    state_H: Tensor | None = None

    def for_merge(self, merge: Merge) -> Parting:
        """What this merge sees: sums only if it asks for them, and copies of all that others hold too."""
        sums, state = (None if x is None else x.clone() for x in (self.sums_HN, self.state_H))
        return replace(self, stay_HM=self.stay_HM.clone(), sums_HN=sums if merge.keeps_sums else None, state_H=state)

    def staying(self, x_HND: Tensor) -> Tensor:
        """The rows of the tokens that stay, [H, M, D]."""
        return x_HND.gather(1, self.stay_HM[..., None].expand(-1, -1, x_HND.shape[2]))

    def going(self, x_HND: Tensor) -> Tensor:
        """The rows of the tokens that go, [H, E, D]."""
        return x_HND.gather(1, self.go_HE[..., None].expand(-1, -1, x_HND.shape[2]))


@dataclass(frozen=True)
class Merged:
    """The kept tokens after merging, fp32 [H, M, D]; None where a side stays as it was.

    took_HM: tokens that received something; all others keep their bits.
    given_H: how many of the tokens that went were merged, int64.
    state_H: fp32, kept with the cache until the next eviction, and counted as bytes; None for none.
    """

    took_HM: Tensor
    given_H: Tensor
    k_HMD: Tensor | None = None
    v_HMD: Tensor | None = None
    state_H: Tensor | None = None


class Merge(Protocol):
    """What happens to evicted tokens. Inherit and write `merge`; the other members have defaults.

    changes: the sides whose kept tokens get other numbers.
    keeps_sums: its attention sums are stored with the cache while it goes on evicting, and count as bytes.
    threshold: "never" merges nothing, which is plain eviction bit for bit; then nothing is kept or recorded either.
    """

    changes: ClassVar[tuple[str, ...]] = ("keys", "values")
    keeps_sums: ClassVar[bool] = False

    @property
    def threshold(self) -> float | str | None: ...

    @property
    def keeps_number(self) -> bool:
        """Whether one fp32 number a layer and KV head is stored with the cache while it goes on evicting, once it has."""
        return False

    def merge(self, parting: Parting) -> Merged:
        """The kept tokens with what they receive."""
        ...


def acts(merge: Merge | None) -> bool:
    """Whether anything can be merged."""
    return merge is not None and merge.threshold != NEVER


def needs_of(merge: Merge | None) -> Needs:
    """Statistics to record for it."""
    return Needs(column_sums=merge is not None and acts(merge) and merge.keeps_sums)


def keeps_number(merge: Merge | None) -> bool:
    """Whether it keeps a number a layer and KV head, once tokens were evicted."""
    return merge is not None and acts(merge) and merge.keeps_number


def check_cosine(threshold: float | str, least: float = -1.0) -> None:
    """UserError unless a threshold is a cosine from `least` to 1, or "never"."""
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool) and least <= threshold <= 1
    require(number or threshold == NEVER, "merge.threshold", threshold, f"a cosine from {least:g} to 1, or {NEVER!r}")
