"""The most that a point held at any time, reading its context included, beside the most that the full cache held.

Every stack compresses a context that was read exactly, so for a moment the exact rows, their statistics and the compressed copy
are there together; only reading in chunks (phase `chunked`) keeps that moment small. Where the full cache just fits, a smaller
one may therefore not.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.analysis.point_row import BASE, RUN_GROUP

PEAKS = ("bytes_peak_most", "peak_ratio")
_WHEN = ["bytes_peak", "bytes_peak_prefill"]  # while answering, and while the context is read and compressed


def peaks(points: pd.DataFrame) -> pd.DataFrame:
    """Columns PEAKS of each point: the larger of its two peaks (over its samples), and that over the full cache's own.

    Missing where one of the peaks is, and the ratio where there is no full cache beside the point.
    """
    most = points[_WHEN].max(axis=1, skipna=False).astype("float64")
    base = points.assign(most=most)[points["stack"] == BASE].groupby(list(RUN_GROUP), sort=False)["most"].max()
    own = [base.get(run, np.nan) for run in points[list(RUN_GROUP)].itertuples(index=False, name=None)]
    full = pd.Series(own, index=points.index, dtype="float64")
    return pd.DataFrame({PEAKS[0]: most, PEAKS[1]: (most / full).where(full > 0)})
