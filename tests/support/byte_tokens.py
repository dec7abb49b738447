"""A whole tokenizer without files: one token a byte, after a few special ones; chat turns have markers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.types import Prompt

BOS, TURN, END = 0, 1, 2
_FIRST = 3


@dataclass(frozen=True)
class ByteTokens:
    """Implements `harness.types.Tokens`."""

    max_length: int | None = None

    def encode(self, text: str) -> list[int]:
        return [byte + _FIRST for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i - _FIRST for i in ids if i >= _FIRST).decode(errors="replace")

    def prompt(self, context: str, question: str, answer_prefix: str, *, chat: bool) -> Prompt:
        before = [BOS, TURN, *self.encode("user\n")] if chat else [BOS]
        after = [END, *self.encode("\n"), TURN, *self.encode("assistant\n")] if chat else []
        return Prompt(
            context=(*before, *self.encode(context)),
            question=(*self.encode(question), *after),
            answer_prefix=tuple(self.encode(answer_prefix)),
        )
