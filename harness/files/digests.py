"""Digests of plain values, by which configurations, examples and records are compared."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def place(unit: str) -> str:
    """Where a unit (a document) stands among all: a random order, drawn from names alone, the same everywhere."""
    return hashlib.sha256(unit.encode()).hexdigest()
