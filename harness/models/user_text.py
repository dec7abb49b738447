"""User text to ids: the words that steer a model are plain text when a user writes them. It knows no prompt and no task.

Text without such words gets the ids that the tokenizer gives it, whatever surrounds it.
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
    """Token ids, and how many control words of a user's text are not there as text."""

    ids: tuple[int, ...]
    lost: int = 0

    def __add__(self, other: Ids) -> Ids:
        return Ids(self.ids + other.ids, self.lost + other.lost)


@dataclass(frozen=True)
class UserText:
    """A transformers tokenizer, and which of its tokens no user may write.

    Attributes:
        hf: the transformers tokenizer, slow or fast.
    """

    hf: Any

    def raw(self, text: str) -> list[int]:
        """Ids of a text whose control words are control tokens; no special token added."""
        return list(self.hf.encode(text, add_special_tokens=False, verbose=False))

    def continued(self, text: str) -> list[int]:
        """As `raw`, of a text that follows another: no space of its own in front, which sentencepiece types would add."""
        plain = self.raw(text)
        if not self._adds_space:
            return plain
        anchor, joint = self.raw("\n"), self.raw("\n" + text)
        return joint[len(anchor) :] if joint[: len(anchor)] == anchor else plain

    def encode(self, text: str, *, before: str = "", after: str = "", first: bool = True) -> Ids:
        """Ids of a user's text between two pieces of a template, whose control words stay control tokens.

        Args:
            text: the user's.
            before: the template's words in front; tokens may join them with the text, as they do in the rendered whole.
            after: those behind.
            first: whether nothing stands in front; see `continued`.
        """
        read = self.raw if first else self.continued
        whole = read(before + text + after)
        found = self._steering(whole, text)
        if not found or found == self._steering(self.raw(before), "") + self._steering(self.raw(after), ""):
            return Ids(tuple(whole))
        pieces = self._words.split(text)  # ordinary text and control words in turn, ordinary ones first and last
        made, last = Ids(()), len(pieces) - 1
        for number, piece in enumerate(pieces):
            if number % 2:
                made += self._word(piece)
                continue
            ends = (before if number == 0 else "", after if number == last else "")
            made += self._ordinary(piece, *ends, first=first and number == 0)
        return made

    def count(self, text: str) -> int:
        """How many control words stand in a text."""
        return len(self._words.findall(text))

    @cached_property
    def control(self) -> Mapping[str, int]:
        """Control words and their ids: special tokens, what the chat templates write, and words of the form `<|...|>`.

        Other added tokens are ordinary text: runs of spaces, tags of HTML, words that somebody added.
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
        """The control tokens among ids; the unknown token is one where the text spells it."""
        spelled = self._unknown is not None and str(self.hf.unk_token) in text
        return [i for i in ids if i in self._ids or (spelled and i == self._unknown)]

    def _ordinary(self, text: str, before: str, after: str, *, first: bool) -> Ids:
        """Text without a control word; one that arises all the same (at a seam, by normalisation) is read letter by letter."""
        read = self.raw if first else self.continued
        whole = read(before + text + after)
        wanted = self._steering(self.raw(before), "") + self._steering(self.raw(after), "")
        if self._steering(whole, "") == wanted:
            return Ids(tuple(whole))
        ends = (read(before) if before else [], self.continued(after) if after else [])
        inner = self._letters(text, first=first and not before)
        lost = len(self._steering(inner, ""))
        return Ids((*ends[0], *(i for i in inner if i not in self._ids), *ends[1]), lost)

    def _word(self, word: str) -> Ids:
        """A control word as text: whole, else cut behind its first letter, else letter by letter; else it is lost."""
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
        """Ids of a text none of whose special tokens are read as such."""
        return list(self.hf.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False))

    def _letters(self, text: str, *, first: bool) -> list[int]:
        return [i for n, letter in enumerate(text) for i in (self.raw if first and n == 0 else self.continued)(letter)]
