"""Any transformers tokenizer as our tasks see one, for prompts that lm-eval feeds to models of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError
from harness.types import Prompt


@dataclass(frozen=True)
class PlainTokens:
    """A transformers tokenizer as our tasks see it, without a chat template (`harness.types.Tokens`)."""

    hf: Any

    @property
    def max_length(self) -> int | None:
        most = int(self.hf.model_max_length)
        return most if most < 10**9 else None  # transformers' way of saying that it does not know

    def encode(self, text: str) -> list[int]:
        return list(self.hf.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def prompt(self, context: str, question: str, answer_prefix: str, *, chat: bool) -> Prompt:
        """The ids of the three pieces, after the special tokens that the tokenizer puts in front."""
        if chat:
            raise UserError("task.chat=True is not possible here: lm-eval puts chat templates around prompts itself")
        first = self.hf.encode(context, add_special_tokens=True, verbose=False)
        return Prompt(
            context=tuple(first), question=tuple(self.encode(question)), answer_prefix=tuple(self.encode(answer_prefix))
        )
