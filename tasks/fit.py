"""Prompts that are longer than the model's positions: refused, or their context is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.errors import UserError
from harness.types import Example, Tokens

SIDES = ("refuse", "left", "middle")


def fitted(example: Example, tokens: Tokens, *, chat: bool, truncate: str, source: str) -> Example:
    """The example; if it is too long and may be cut, with a shorter context and marked truncated.

    Args:
        example: with max_new_tokens of answer.
        tokens: of the model.
        chat: whether the chat template goes around the prompt.
        truncate: one of SIDES: refuse, or cut the context at its left or in its middle.
        source: where the example comes from, for the error.

    Raises:
        UserError: too long, and truncate is refuse or cutting the context is not enough.
    """
    over = _over(example, tokens, chat)
    if over <= 0:
        return example
    limit = tokens.max_length
    if truncate == "refuse":
        raise UserError(
            f"{source}, example {example.id}: prompt and answer take {over + (limit or 0)} tokens and the model has "
            f"{limit} (task.truncate=left or middle cuts the context and marks the example)"
        )
    ids = tokens.encode(example.context)
    kept = len(ids)
    while over > 0 and kept > 0:
        kept = max(0, kept - over)
        context = tokens.decode(ids[len(ids) - kept :] if truncate == "left" else _ends(ids, kept))
        example = replace(example, context=context.strip("\ufffd"), truncated=True)
        over = _over(example, tokens, chat)
    if not example.context.strip():
        raise UserError(f"{source}, example {example.id}: question and answer alone do not leave room in {limit} tokens")
    return example


def _over(example: Example, tokens: Tokens, chat: bool) -> int:
    """Tokens of prompt and answer beyond the model's positions; 0 or less if it fits."""
    if tokens.max_length is None:
        return 0
    prompt = tokens.prompt(example.context, example.question, example.answer_prefix, chat=chat)
    return len(prompt.ids) + example.max_new_tokens - tokens.max_length


def _ends(ids: Sequence[int], kept: int) -> list[int]:
    head = kept // 2
    return [*ids[:head], *ids[len(ids) - (kept - head) :]]
