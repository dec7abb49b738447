"""How a point is called in tables, figures and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def mode(row: Mapping[str, Any] | pd.Series[Any]) -> str:
    """Whether the question was seen when compressing, as tables and pages name it everywhere."""
    return "query-aware" if row["query_aware"] else "query-agnostic"
