"""The most similar layers share one store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from harness.errors import require
from harness.stages.limits import Calibration
from harness.stages.share.sharing import Measured, Share


@dataclass(frozen=True, kw_only=True)
class SimilarLayers(Share):
    """Pairs of layers, the most similar on calibration text first; the upper one of a pair reads the rows of the lower.

    Similarity is the mean cosine of keys and values over tokens and heads. Taken greedily: each layer is in one pair at most.
    KVSharer (arXiv 2410.18517) ranks pairs by dissimilarity and tests outputs; here nothing but similarity is asked.

    readers: share of the layers that read another's store, rounded down; at most half. Bytes do not depend on which they are.
    """

    readers: float = 0.25
    calibration: Calibration | None = None
    measured: Measured | None = field(default=None, repr=False, compare=False)  # set by `fitted`

    def __post_init__(self) -> None:
        ok = isinstance(self.readers, (int, float)) and 0 < self.readers <= 0.5
        require(ok, "share.readers", self.readers, "a share of the layers, above 0 and at most 0.5")
        require(self.calibration is not None, "share.calibration", None, "the text on which layers are compared")

    def fitted(self, measured: Measured) -> SimilarLayers:
        """Itself with similarities [L] of each layer to layers 0 .. L - 1, named similarity.LAYER."""
        return replace(self, measured=measured)

    def owners(self, layers: Sequence[int]) -> Mapping[int, int]:
        """Of each reader; before the text was read the pairs are neighbours, which is enough to say how many there are."""
        wanted = int(Fraction(str(self.readers)) * len(layers))
        both = [(low, high) for at, low in enumerate(layers) for high in layers[at + 1 :]]
        ranked = sorted(both, key=lambda pair: (-self._between(*pair), pair))
        found: dict[int, int] = {}
        for low, high in ranked:
            if len(found) < wanted and not {low, high} & {*found, *found.values()}:
                found[high] = low
        return found

    def _between(self, low: int, high: int) -> float:
        return self.measured.similarity(low, high) if self.measured else low - high

    def info(self) -> dict[str, object]:
        about = {"calibration": dict(self.measured.about)} if self.measured else {}
        return {"share": "similar layers", "readers": self.readers, **about}

    @property
    def words(self) -> str:
        return f"{self.readers:g} of the layers read similar ones"
