"""What was measured as a table: medians over the repeats, their spread, and each against the full cache in the same repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd

from harness.analysis.labels import label_of
from harness.configure.arms import FULL, Arm
from harness.timing.measured import Timed


def speeds(arms: Sequence[Arm], found: Mapping[str, Timed]) -> pd.DataFrame:
    """One row an arm, the full cache first.

    Seconds and rates are medians, `_lo` and `_hi` the least and the most of any repeat. `to_first_ratio` and `rate_ratio` are
    medians of the ratio to the full cache in the same repeat; bytes are of one sequence.
    """
    return pd.DataFrame([_row(arm, found[arm.name], found[FULL]) for arm in arms])


def _row(arm: Arm, one: Timed, full: Timed) -> dict[str, Any]:
    label = label_of({"stack": arm.label, "stack_config": arm.config, "point": arm.point})
    known: dict[str, Any] = {"stack": arm.label, "arm": label, "repeats": len(one.repeats), "error": one.error}
    if one.error:
        return known
    for name in ("to_first", "rate", "prefill", "compress"):
        values = [getattr(repeat, name) for repeat in one.repeats]
        known |= {name: median(values), f"{name}_lo": min(values), f"{name}_hi": max(values)}
        if name in ("to_first", "rate") and not full.error:
            pairs = zip(values, (getattr(repeat, name) for repeat in full.repeats), strict=True)
            known[f"{name}_ratio"] = median(mine / base for mine, base in pairs)
    return known | {"kv_bytes": one.held, "transient_read": one.transient_read, "transient_decode": one.transient_decode}
