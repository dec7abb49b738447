"""Limits of a model's positions, and RoPE angles that depend on the length of the text (dynamic NTK, longrope).

Such angles are computed for one fixed length per sequence, so that all its keys and queries are rotated alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.kv.compat import decoder_of
from harness.kv.rope import varies_with_length

_CACHED = "max_seq_len_cached"  # attribute: the length that dynamic NTK last computed its angles for


def learned_positions(model: PreTrainedModel) -> int | None:
    """Size of a learned position table (GPT-2, OPT); None if positions are computed, so that texts may be longer."""
    decoder = model.get_decoder()
    words = model.get_input_embeddings()
    tables = [
        table
        for name, table in decoder.named_modules()
        if isinstance(table, torch.nn.Embedding) and table is not words and ("pos" in name or name.endswith("wpe"))
    ]
    sizes = [table.num_embeddings for table in tables]
    # xglm computes its table, but makes it longer by the tokens of one forward only.
    sizes += [module.weights.shape[0] - module.offset for module in decoder.modules() if hasattr(module, "make_weights")]
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(sizes + ([int(most)] if most else [])) if sizes else None


def moving_rotary(model: PreTrainedModel) -> torch.nn.Module | None:
    """The rotary embedding if its angles depend on the length of the text, else None."""
    rotary = getattr(decoder_of(model), "rotary_emb", None)
    return rotary if rotary is not None and varies_with_length(model.config.get_text_config(decoder=True)) else None


@contextmanager
def _held(rotary: torch.nn.Module, lengths: Sequence[int]) -> Iterator[None]:
    own = rotary.forward

    def forward(x: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for length in set(lengths):
            _forget(rotary)
            last = torch.full_like(position_ids[:, :1], length - 1)  # transformers looks at the largest position
            cos, sin = own(x, torch.cat((position_ids.clamp(max=length - 1), last), 1), **kwargs)
            found[length] = cos[:, :-1], sin[:, :-1]
        cos, sin = (torch.stack([found[n][i][b] for b, n in enumerate(lengths)]) for i in (0, 1))
        return cos, sin

    rotary.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        rotary.forward = own  # type: ignore[method-assign]
        _forget(rotary)


def held(rotary: torch.nn.Module | None, lengths: Sequence[int | None]) -> Any:
    """A context in which the angles of each sequence of a batch are those of a text of its own length.

    Args:
        rotary: from `moving_rotary`; with None nothing is done.
        lengths: tokens of the whole text, prompt and answer, of each sequence.
    """
    if rotary is None:
        return nullcontext()
    known = [length for length in lengths if length is not None]
    assert len(known) == len(lengths), "a model whose rotation depends on the length needs one for every sequence"
    return _held(rotary, known)


def _forget(rotary: torch.nn.Module) -> None:
    """Reset the cached length of dynamic NTK, which otherwise never computes angles for a shorter text again."""
    for name in [name for name in vars(rotary) if name.endswith(_CACHED)]:
        setattr(rotary, name, 0)
