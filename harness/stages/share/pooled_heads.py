"""KV heads of a layer averaged into fewer: GQA and MQA by pooling."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import UserError, require
from harness.stages.share.sharing import Share


@dataclass(frozen=True, kw_only=True)
class PooledHeads(Share):
    """The plain mean of neighbouring heads, as GQA checkpoints are made from MHA ones (arXiv 2305.13245); no training follows.

    groups: heads that a layer stores; None: the largest proper divisor of its heads (8 -> 4, 3 -> 1). As many as there are
    changes nothing. The mean is that of keys as they are stored, after RoPE (rotations are linear, so the order is the same).
    """

    groups: int | None = None

    def __post_init__(self) -> None:
        ok = self.groups is None or (isinstance(self.groups, int) and self.groups > 0)
        require(ok, "share.groups", self.groups, "a positive number of stored heads, or null")

    @property
    def pools(self) -> bool:
        return True

    def heads(self, heads: int) -> int:
        """Stored heads of a layer; UserError if they cannot be groups of equal size."""
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        if self.groups is None:
            return divisors[-2] if heads > 1 else 1
        if self.groups not in divisors:
            allowed = ", ".join(map(str, divisors))
            raise UserError(f"share.groups={self.groups} is not possible for {heads} KV heads: allowed are {allowed}, or null")
        return self.groups

    def info(self) -> dict[str, object]:
        return {"share": "pooled heads", "groups": self.groups}

    @property
    def words(self) -> str:
        return "pooled heads" if self.groups is None else f"heads pooled to {self.groups}"
