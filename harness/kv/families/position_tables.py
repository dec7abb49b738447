"""Position tables of decoders whose forward takes no positions: they index them by the length of transformers' own cache.

Sequences of a batch stand at places of their own, so for the time of a forward the table is asked for those instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

TABLED = ("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")  # model types with such a table
NAME = "embed_positions"


def position_table(model: PreTrainedModel) -> torch.nn.Embedding | None:
    """The table of a decoder of these families; None for others, which are given positions."""
    if model.config.get_text_config(decoder=True).model_type not in TABLED:
        return None
    (table,) = (module for name, module in model.named_modules() if name.endswith(NAME))
    assert isinstance(table, torch.nn.Embedding)
    return table


@contextmanager
def _placed(table: torch.nn.Embedding, positions_BL: Tensor) -> Iterator[None]:
    own, first = table.forward, int(getattr(table, "offset", 0))

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return torch.nn.functional.embedding(positions_BL + first, table.weight)

    table.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        table.forward = own  # type: ignore[method-assign]


def placed(table: torch.nn.Embedding | None, positions_BL: Tensor) -> Any:
    """A context in which the table, from `position_table`, gives each token the row of its own position."""
    return nullcontext() if table is None else _placed(table, positions_BL)
