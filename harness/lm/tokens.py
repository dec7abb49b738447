"""Text to ids and back for one model: chat template, BOS, special tokens.

It does not know tasks, caches or generation. Every tokenizer is tried when it is loaded: one that loses characters or
shreds English is refused, for its scores would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from harness.types import Prompt, UserError

_LEAST_CHARACTERS_PER_TOKEN = 3.5
_MARK = "MESSAGE-STANDS-HERE"
_ROUND_TRIPS = (
    "two  spaces, a tab\tand a line\nbreak\n\n    indented",
    "0 12 345 6789012, 3.14 and 1e-5",
    "naïve café, Ελληνικά, русский, 日本語, עברית, 🙂",
    "x = {'a': [1, 2]}  # <tag> & \"quotes\" \\ %",
)
_PROSE = (
    "The keeper of the lighthouse had lived on the island for eleven years before anyone thought of asking him "
    "whether he was lonely. He answered that the winter storms were good company, that the supply boat brought "
    "newspapers every second month, and that a man who reads slowly can make a single letter last until spring."
)


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer as the tasks see it (`harness.types.Tokens`).

    Attributes:
        hf: the transformers tokenizer.
        max_length: positions the model was built for, None when unlimited.
    """

    hf: Any
    max_length: int | None = None

    @classmethod
    def load(cls, directory: Path, *, max_length: int | None, bytewise: bool = False) -> Tokenizer:
        """From a directory of tokenizer files, checked.

        Args:
            directory: holds the tokenizer beside the model's config.json.
            max_length: positions of the model.
            bytewise: one token a byte is what is wanted, so do not ask for English words.

        Raises:
            UserError: no tokenizer there, or one that changes text.
        """
        try:
            hf = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
            raise UserError(f"the tokenizer in {directory} cannot be loaded: {str(error).splitlines()[0]}") from None
        tokens = cls(hf, max_length)
        tokens.check(bytewise=bytewise)
        return tokens

    def check(self, *, bytewise: bool = False) -> None:
        """Refuse a tokenizer that loses characters or needs too many tokens for English (UserError)."""
        for text in (*_ROUND_TRIPS, _PROSE):
            back = self.decode(self.encode(text))
            if back != text:
                raise UserError(f"the tokenizer does not give text back: {text!r} became {back!r}")
        density = len(_PROSE) / len(self.encode(_PROSE))
        if not bytewise and density <= _LEAST_CHARACTERS_PER_TOKEN:
            raise UserError(
                f"the tokenizer gives {density:.2f} characters a token on English, expected more than "
                f"{_LEAST_CHARACTERS_PER_TOKEN}: it is broken, or a byte tokenizer (then set model.tokenizer=bytes)"
            )

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special token added."""
        return list(self.hf.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens stripped."""
        return str(self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @cached_property
    def bos_ids(self) -> tuple[int, ...]:
        """What the model expects in front of every window: its BOS, or nothing."""
        bos = self.hf.bos_token_id
        starts = list(self.hf.encode("a", add_special_tokens=True))[:1]
        return (int(bos),) if bos is not None and starts == [bos] else ()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return () if self.hf.eos_token_id is None else (int(self.hf.eos_token_id),)

    def prompt(self, context: str, question: str, answer_prefix: str, *, chat: bool) -> Prompt:
        """Ids of the three pieces, each tokenized alone.

        Args:
            context: what gets compressed.
            question: what follows it in the same user message.
            answer_prefix: the first words of the answer.
            chat: put the model's chat template around context + question; else only BOS in front, where the model
                expects one. The template's own BOS is never doubled.

        Raises:
            UserError: `chat` on a tokenizer without a usable chat template.
        """
        head, tail = self._template if chat else ("", "")
        first = self.encode(head + context)
        bos = self.bos_ids
        if bos and tuple(first[:1]) != bos:
            first = [*bos, *first]
        while bos and tuple(first[1:2]) == bos:  # a template and a text that both bring one
            del first[1]
        return Prompt(
            context=tuple(first),
            question=tuple(self._continue(question + tail)),
            answer_prefix=tuple(self._continue(answer_prefix)),
        )

    @cached_property
    def _template(self) -> tuple[str, str]:
        """The rendered chat template before and after the user's message."""
        if not self.hf.chat_template:
            raise UserError("task.chat=True is not possible: the model's tokenizer has no chat template (task.chat=false)")
        text = self.hf.apply_chat_template(
            [{"role": "user", "content": _MARK}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # read by templates of reasoning models: the answer starts at once
            date_string="26 Jul 2024",  # read by templates that print today's date: prompts must not change overnight
        )
        if text.count(_MARK) != 1:
            raise UserError("task.chat=True is not possible: the chat template does not show the message exactly once")
        head, tail = text.split(_MARK)
        return head, tail

    def _continue(self, text: str) -> list[int]:
        """Ids of a text that follows another: no space of its own in front, which sentencepiece types would add."""
        plain = self.encode(text)
        if not self._adds_space:
            return plain
        anchor, joint = self.encode("\n"), self.encode("\n" + text)
        return joint[len(anchor) :] if joint[: len(anchor)] == anchor else plain

    @cached_property
    def _adds_space(self) -> bool:
        return str(self.hf.convert_ids_to_tokens(self.encode("a"))[0]).startswith("▁")
