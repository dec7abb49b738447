"""How numbers are written for people: IEC bytes, scores, intervals."""

from __future__ import annotations

import math

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
