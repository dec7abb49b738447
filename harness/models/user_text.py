"""User text to token ids, where control words (special tokens, template words) are encoded as plain text.

Text without control words has the ids of the tokenizer itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_PIPED = re.compile(r"<[|｜].+[|｜]>")


@dataclass(frozen=True)
class Ids:
    """Token ids, and the number of control words that could not be encoded as text (they are missing)."""

    ids: tuple[int, ...]
    lost: int = 0

    def __add__(self, other: Ids) -> Ids:
        return Ids(self.ids + other.ids, self.lost + other.lost)


@dataclass(frozen=True)
class UserText:
    """A transformers tokenizer for text that users write.

    Attributes:
        hf: the transformers tokenizer, slow or fast.
    """

    hf: Any

    def raw(self, text: str) -> list[int]:
        """Ids of a text where control words become control tokens; no special tokens are added."""
        return list(self.hf.encode(text, add_special_tokens=False, verbose=False))

    def continued(self, text: str) -> list[int]:
        """As `raw`, for text that follows other text: without the leading space that sentencepiece tokenizers add."""
        plain = self.raw(text)
        if not self._adds_space:
            return plain
        anchor, joint = self.raw("\n"), self.raw("\n" + text)
        return joint[len(anchor) :] if joint[: len(anchor)] == anchor else plain

    def encode(self, text: str, *, before: str = "", after: str = "", first: bool = True) -> Ids:
        """Ids of a user's text between two pieces of a template, whose control words stay control tokens.

        Args:
            text: of the user.
            before: the template's text in front; tokens may cross its border with the text, as in the rendered prompt.
            after: the template's text behind.
            first: whether nothing precedes it; see `continued`.
        """
        read = self.raw if first else self.continued
        whole = read(before + text + after)
        found = self._steering(whole, text)
        if not found or found == self._steering(self.raw(before), "") + self._steering(self.raw(after), ""):
            return Ids(tuple(whole))
        pieces = self._words.split(text)  # ordinary text and control words alternate, ordinary text first and last
        made, last = Ids(()), len(pieces) - 1
        for number, piece in enumerate(pieces):
            if number % 2:
                made += self._word(piece)
                continue
            ends = (before if number == 0 else "", after if number == last else "")
            made += self._ordinary(piece, *ends, first=first and number == 0)
        return made

    def count(self, text: str) -> int:
        """Number of control words in a text."""
        return len(self._words.findall(text))

    @cached_property
    def control(self) -> Mapping[str, int]:
        """Control words and their ids: special tokens, what the chat templates write, and words of the form `<|...|>`.

        Other added tokens are ordinary text: runs of spaces, tags of HTML, added words.
        """
        templates = self.hf.chat_template or ""
        source = "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
        special = {int(i) for i in self.hf.all_special_ids}
        found: dict[str, int] = {}
        for number, token in self.hf.added_tokens_decoder.items():
            word = str(token.content)
            steers = word in source and not word.isspace() and not word.isalnum()
            if word and (token.special or int(number) in special or steers or _PIPED.fullmatch(word)):
                found[word] = int(number)
        return found

    @cached_property
    def _unknown(self) -> int | None:
        found = self.hf.unk_token_id
        return None if found is None else int(found)

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self.control.values()) - {self._unknown}

    @cached_property
    def _words(self) -> re.Pattern[str]:
        longest_first = sorted(self.control, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"((?!))")

    @cached_property
    def _adds_space(self) -> bool:
        return str(self.hf.convert_ids_to_tokens(self.raw("a"))[0]).startswith("▁")

    def _steering(self, ids: Sequence[int], text: str) -> list[int]:
        """The control tokens among ids; the unknown token counts if the text contains its word."""
        spelled = self._unknown is not None and str(self.hf.unk_token) in text
        return [i for i in ids if i in self._ids or (spelled and i == self._unknown)]

    def _ordinary(self, text: str, before: str, after: str, *, first: bool) -> Ids:
        """Ids of text without control words; letter by letter if a control token appears nevertheless (normalisation)."""
        read = self.raw if first else self.continued
        whole = read(before + text + after)
        expected = self._steering(self.raw(before), "") + self._steering(self.raw(after), "")
        if self._steering(whole, "") == expected:
            return Ids(tuple(whole))
        ends = (read(before) if before else [], self.continued(after) if after else [])
        inner = self._letters(text, first=first and not before)
        lost = len(self._steering(inner, ""))
        return Ids((*ends[0], *(i for i in inner if i not in self._ids), *ends[1]), lost)

    def _word(self, word: str) -> Ids:
        """Ids of a control word as plain text: whole, or cut after its first letter, or letter by letter; else it is lost."""
        anchor = self._plain("\n")
        joint = self._plain("\n" + word)
        whole = joint[len(anchor) :] if joint[: len(anchor)] == anchor else self._plain(word)
        for ids in (whole, [*self.continued(word[0]), *self.continued(word[1:])], self._letters(word, first=False)):
            if (
                not self._ids.intersection(ids)
                and self.hf.decode(ids, clean_up_tokenization_spaces=False).strip() == word.strip()
            ):
                return Ids(tuple(ids))
        return Ids(tuple(i for i in ids if i not in self._ids), 1)

    def _plain(self, text: str) -> list[int]:
        """Ids of a text without recognising special tokens."""
        return list(self.hf.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False))

    def _letters(self, text: str, *, first: bool) -> list[int]:
        return [i for n, letter in enumerate(text) for i in (self.raw if first and n == 0 else self.continued)(letter)]
