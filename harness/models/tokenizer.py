"""Text to token ids and back for one model: chat template, BOS, special tokens.

Tokenizers are checked when they are loaded: one that loses characters, or splits English into far too many tokens, is refused,
as scores would be silently wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from harness.errors import UserError, valid
from harness.models.user_text import Ids, UserText
from harness.types import Prompt

_LEAST_CHARACTERS_PER_TOKEN = 3.5
_MARK = "MESSAGE-STANDS-HERE"  # replaced by the message
_NO_CHAT = "task.chat=True is not possible:"
_THINKS = re.compile(
    r"[<\[][|｜]?(?P<end>/|end_of_)?(?:begin_of_)?(?:think|thinking|thought|thoughts|reason|reasoning|analysis|scratchpad)[|｜]?[>\]]",
    re.IGNORECASE,
)
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
    """A model's tokenizer as tasks see it (implements `harness.types.Tokens`).

    Attributes:
        hf: the transformers tokenizer.
        max_length: positions the model was built for, None if unlimited.
    """

    hf: Any
    max_length: int | None = None

    @classmethod
    def load(cls, directory: Path, *, max_length: int | None, bytewise: bool = False) -> Tokenizer:
        """Load from a directory of tokenizer files, and check.

        Args:
            directory: with tokenizer files and the model's config.json.
            max_length: positions of the model.
            bytewise: one token a byte is intended; the length of English text is not checked.

        Raises:
            UserError: no tokenizer there, or one that fails `check`.
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
                raise UserError(f"the tokenizer does not return the same text: {text!r} became {back!r}")
        density = len(_PROSE) / len(self.encode(_PROSE))
        if not bytewise and density <= _LEAST_CHARACTERS_PER_TOKEN:
            raise UserError(
                f"the tokenizer has {density:.2f} characters a token on English, expected more than "
                f"{_LEAST_CHARACTERS_PER_TOKEN}: it is broken, or a byte tokenizer (then set model.tokenizer=bytes)"
            )

    @cached_property
    def user(self) -> UserText:
        """The encoder of text that users write."""
        return UserText(self.hf)

    def encode(self, text: str) -> list[int]:
        """Ids of a user's text, without special tokens; control words in it are encoded as plain text.

        Raises:
            UserError: the text contains half of a surrogate pair.
        """
        return list(self._user(text).ids)

    def _user(self, text: str, **how: Any) -> Ids:
        try:
            return self.user.encode(text, **how)
        except (TypeError, UnicodeEncodeError):  # which one depends on the tokenizer
            if valid(text):
                raise
            raise UserError(f"text with half of a surrogate pair has no tokens: {text!r:.80}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @cached_property
    def bos_ids(self) -> tuple[int, ...]:
        """The ids that the model expects in front of every text: its BOS, or nothing."""
        bos = self.hf.bos_token_id
        starts = list(self.hf.encode("a", add_special_tokens=True))[:1]
        return (int(bos),) if bos is not None and starts == [bos] else ()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return () if self.hf.eos_token_id is None else (int(self.hf.eos_token_id),)

    def prompt(self, context: str, question: str, answer_prefix: str, *, chat: bool) -> Prompt:
        """Ids of the three pieces of a prompt, each tokenized alone.

        Args:
            context: the text whose cache is compressed.
            question: the text after it in the same user message.
            answer_prefix: the first words of the answer.
            chat: put the model's chat template around context + question; otherwise only BOS in front, if the model
                expects one. BOS is never doubled.

        Raises:
            UserError: `chat` on a tokenizer without a usable chat template.
        """
        head, tail = self._template if chat else ("", "")
        made = self._user(context, before=head)
        first, bos = list(made.ids), self.bos_ids
        if bos and tuple(first[:1]) != bos:
            first = [*bos, *first]
        while bos and tuple(first[1:2]) == bos:  # some templates add two
            del first[1]
        asked = self._user(question, after=tail, first=False)
        begun = self._user(answer_prefix, first=False)
        return Prompt(
            context=tuple(first),
            question=asked.ids,
            answer_prefix=begun.ids,
            control_text=made.lost + asked.lost + begun.lost + (self._forged(context) + self._forged(question) if chat else 0),
        )

    def _forged(self, text: str) -> int:
        """How often a text contains the end of the user's message, if the template marks it by plain words, not by a token."""
        end = self._template[1].strip()
        return text.count(end) if end and not self.user.count(end) else 0

    def render(self, messages: Sequence[Mapping[str, str]], **how: Any) -> str:
        """The chat template around messages, as text.

        Raises:
            UserError: no template, several without a default, or one that fails (with its own message).
        """
        templates = self.hf.chat_template
        if not templates:
            raise UserError(f"{_NO_CHAT} the model's tokenizer has no chat template (task.chat=false)")
        if isinstance(templates, dict) and "default" not in templates:
            named = ", ".join(sorted(templates))
            raise UserError(f"{_NO_CHAT} the model's chat templates are {named}, and none is the default (task.chat=false)")
        try:
            return str(self.hf.apply_chat_template(list(messages), tokenize=False, **how))
        except Exception as error:  # templates are programs: anything may be raised
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"{_NO_CHAT} the model's chat template fails: {line} (task.chat=false)") from None

    @cached_property
    def thinking(self) -> str | None:
        """The tag of a thinking block that the chat template leaves open before the answer, or None."""
        opened: list[str] = []
        for found in _THINKS.finditer(self._template[1]):
            opened = [] if found["end"] else [*opened, found.group()]
        return opened[-1] if opened else None

    @cached_property
    def _template(self) -> tuple[str, str]:
        """The rendered chat template before and after the user's message."""
        text = self.render(
            [{"role": "user", "content": _MARK}],
            add_generation_prompt=True,
            enable_thinking=False,  # for reasoning models: the answer starts at once
            date_string="26 Jul 2024",  # for templates that print the date: prompts must not change with the day
        )
        if text.count(_MARK) != 1:
            raise UserError(f"{_NO_CHAT} the chat template does not show the message exactly once")
        head, tail = text.split(_MARK)
        return head, tail
