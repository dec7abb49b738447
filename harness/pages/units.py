"""How numbers are written for people: IEC bytes, scores, intervals, differences."""

from __future__ import annotations

import math
from typing import NamedTuple

from harness.analysis.points import Row

_IEC = ("B", "KiB", "MiB", "GiB", "TiB")


def iec(value: float) -> str:
    """Bytes with an IEC unit, three significant digits: 1536 -> "1.50 KiB"; missing is a dash."""
    if not math.isfinite(value):
        return "–"
    power = min(max(int(math.log2(max(abs(value), 1)) // 10), 0), len(_IEC) - 1)
    scaled = value / 1024**power
    digits = 0 if power == 0 or abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:.{digits}f} {_IEC[power]}"


def score_text(value: float) -> str:
    """A score: two decimals below 100, whole numbers from 1000; infinity as a word, missing as a dash."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def interval_text(low: float, high: float) -> str:
    """[low, high], or nothing where there is none."""
    return f"[{score_text(low)}, {score_text(high)}]" if math.isfinite(high - low) else ""


def small(value: float) -> str:
    """A measure near zero: two significant digits, missing as a dash."""
    return f"{value:.2g}" if math.isfinite(value) else "–"


def signed(value: float) -> str:
    """A difference with its sign."""
    return "–" if not math.isfinite(value) else f"{value:+.2f}" if abs(value) < 1000 else f"{value:+,.0f}"


def signed_small(value: float) -> str:
    """A difference near zero with its sign: two significant digits, whole numbers from 10; missing as a dash."""
    return "–" if not math.isfinite(value) else f"{value:+#.2g}" if abs(value) < 9.95 else f"{value:+,.0f}"


def share_text(ratio: float) -> str:
    """A ratio to the full cache as a percentage."""
    if not math.isfinite(ratio):
        return "–"
    return f"{100 * ratio:.3g} %" if ratio < 10 else f"{100 * ratio:,.0f} %"


class Difference(NamedTuple):
    """A paired difference and its interval: of perplexities in nats, of other scores as they are. Missing is NaN."""

    value: float
    low: float
    high: float
    in_nats: bool

    @property
    def text(self) -> str:
        """With its sign, and its interval where there is one; the unit is the reader's to add."""
        if not self.in_nats:
            return f"{signed(self.value)} {interval_text(self.low, self.high)}".strip()
        if not math.isfinite(self.high - self.low):
            return signed_small(self.value)
        return f"{signed_small(self.value)} [{signed_small(self.low)}, {signed_small(self.high)}]"


def difference(row: Row, value: str = "diff_to_full") -> Difference:
    """The difference that a row of points (or of contrasts: `value` is then diff_to_against) is judged by."""
    in_nats = math.isfinite(row["nll_diff"]) and math.isfinite(row[value])
    names = ("nll_diff", "nll_diff_lo", "nll_diff_hi") if in_nats else (value, "diff_lo", "diff_hi")
    found, low, high = (float(row[name]) for name in names)
    return Difference(found, low, high, in_nats)
