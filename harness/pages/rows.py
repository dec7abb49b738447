"""Rows of a points table as plain mappings, which many readers of single values get at far faster than pandas' own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import pandas as pd

Row: TypeAlias = "Mapping[str, Any] | pd.Series[Any]"


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """All rows in their order, by column name."""
    return cast("list[dict[str, Any]]", table.to_dict("records"))
