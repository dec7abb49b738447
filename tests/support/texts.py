"""A corpus of given documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Implements `harness.types.Corpus`."""

    texts: tuple[str, ...]
    name: str = "mine"
    licence: str = "none"
    digest: str = ""

    def documents(self) -> Sequence[str]:
        return self.texts
