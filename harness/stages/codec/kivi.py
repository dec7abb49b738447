"""KIVI: which integer groups its keys and its values use; it knows nothing of eviction or of where rows come from."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import require
from harness.stages.codec.int_groups import IntGroups


@dataclass(frozen=True, kw_only=True)
class Kivi(IntGroups):
    """KIVI (arXiv 2402.02750): asymmetric groups, keys per channel, values per token.

    Keys leave the exact tail R = `residual` at a time, once R are there: of T keys the last T mod R are exact. The newest R
    values are exact, older ones leave one by one. Rows may come in any number at a time, and the prefill itself attends to
    exact rows. What is stored are the IntGroups that `for_role` gives.
    Bytes of the encoded rows, per K and V: 2 * d * (bits / 8 + 2 * itemsize / group) a row.
    """

    name: str = "kivi2"
    bits: int = 2
    residual: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.axis == "auto", "codec.axis", self.axis, "KIVI's is auto: keys per channel, values per token")
        require(self.flush_tokens is None, "codec.flush_tokens", self.flush_tokens, "KIVI's keys leave `residual` at a time")
        ok = self.residual > 0 and self.residual % (self.group or 1) == 0
        require(ok, "codec.residual", self.residual, f"a multiple of the group, {self.group}")

    def for_role(self, role: str) -> IntGroups:
        """Groups of keys or of values."""
        keys = role == "keys"
        return IntGroups(
            name=self.name,
            bits=self.bits,
            symmetric=self.symmetric,
            group=self.group,
            axis="channel" if keys else "token",
            sinks=self.sinks,
            residual=0 if keys else self.residual,
            flush_tokens=self.residual if keys else None,
        )
