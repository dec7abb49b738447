"""How many numbers a low-rank codec stores of a token: as such, as a fraction, as many as fit into bytes, or by energy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from harness.errors import UserError, require

UNITS = ("numbers", "fraction", "bytes", "energy")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Numbers of a token and KV head. Heads that share coefficients have one rank: this times their number.

    unit:
        "numbers": the value itself.
        "fraction": of the head dim, rounded down (Palu's ratio of what is left).
        "bytes": the most numbers whose stored bytes a token and KV head are at most value; the basis is not among them.
        "energy": the fewest numbers that hold this share of the squared length of what the basis was found on, in the mean
            over all layers, which have one rank.
    """

    unit: str = "fraction"
    value: float

    def __post_init__(self) -> None:
        require(self.unit in UNITS, "codec.rank.unit", self.unit, f"allowed are {', '.join(UNITS)}")
        number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        require(number, "codec.rank.value", self.value, "a number")
        if self.unit in ("fraction", "energy"):
            require(0 < self.value <= 1, "codec.rank.value", self.value, f"a {self.unit} is above 0 and at most 1")
        elif self.unit == "numbers":
            whole = float(self.value).is_integer() and self.value > 0
            require(whole, "codec.rank.value", self.value, "a positive whole number")
        else:
            require(self.value > 0, "codec.rank.value", self.value, "a positive number of bytes a token and KV head")

    @property
    def known(self) -> bool:
        """Whether it follows from shapes."""
        return self.unit != "energy"

    def numbers(self, d: int, fits: Callable[[int], bool], nbytes: Callable[[int], Fraction]) -> int:
        """Numbers of a token and KV head of dim d.

        fits: whether so many can be stored at all. nbytes: bytes a token and KV head of so many.

        Raises:
            UserError: none can be stored, or the rank does not follow from shapes.
        """
        if not self.known:
            raise UserError(
                "codec.rank.unit='energy' is not known before the basis is found on a model; legal are numbers, fraction, bytes"
            )
        if self.unit == "numbers":
            if self.value > d:
                raise UserError(f"codec.rank.value={self.value:g} is not possible: heads have {d} channels, and no more rank")
            return int(self.value)
        most = d if self.unit == "bytes" else int(Fraction(str(self.value)) * d)
        found = next((q for q in range(most, 0, -1) if fits(q) and (self.unit != "bytes" or nbytes(q) <= self.value)), 0)
        if not found:
            raise UserError(f"codec.rank.value={self.value:g} {self.unit} is not possible: too little for one number of {d}")
        return found
