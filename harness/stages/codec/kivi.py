"""KIVI: asymmetric integer groups, keys per channel, values per token."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import require
from harness.stages.codec.int_groups import IntGroups


@dataclass(frozen=True, kw_only=True)
class Kivi(IntGroups):
    """KIVI (arXiv 2402.02750; kvpress: none): x' = q * s + m, m = min, s = (max - min) / (2^bits - 1) of a group.

    Keys: groups of `group` tokens of one channel, after RoPE; encoded R = `residual` tokens at a time, so that of T keys the
    last T mod R are exact. Values: groups of `group` channels of one token; the newest R are exact. The prefill attends to
    exact keys and values. As the authors' code, but codes do not depend on how many tokens arrive at a time.

    A factory: `for_role` returns the IntGroups that do the work.
    Bytes of an encoded token, keys and values together: 2 * d * (bits / 8 + 2 * itemsize / group) per KV head.
    """

    name: str = "kivi2"
    bits: int = 2
    residual: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.axis == "auto", "codec.axis", self.axis, "KIVI's is auto: keys per channel, values per token")
        require(self.flush_tokens is None, "codec.flush_tokens", self.flush_tokens, "KIVI encodes `residual` keys at a time")
        ok = self.residual > 0 and self.residual % (self.group or 1) == 0
        require(ok, "codec.residual", self.residual, f"a multiple of the group, {self.group}")

    def for_role(self, role: str) -> IntGroups:
        """The integer groups of keys or of values."""
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
