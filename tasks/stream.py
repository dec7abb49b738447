"""Perplexity streams: long documents to be read chunk by chunk through the compressed cache."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UserError, require
from harness.types import Corpus, Example, Score, Tokens


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents of exactly `tokens` tokens from seeded places of a corpus; perplexity of the tokens after the first.

    Attributes:
        tokens: tokens read per document, BOS included if the model expects one.
        documents: how many documents; each from another place.
        chunk: tokens fed at once, between two compressions; 1 is exact streaming.
        context: first tokens that are prefilled exactly and compressed once before the stream begins; needed by stacks that
            evict once (phase prefill). 0: every stack compresses from the first chunk on.
        start: token offset in the corpus, for a stream from a known place; null draws places from the seed.
    """

    tokens: int = 1024
    documents: int = 8
    chunk: int = 32
    context: int = 0
    start: int | None = None

    runner = "stream"
    name = "stream"
    metric = "perplexity"
    query_aware = False
    chat = False
    chance = float("nan")  # the vocabulary's size: a property of the model

    def __post_init__(self) -> None:
        for key, least in (("tokens", 2), ("documents", 1), ("chunk", 1), ("context", 0)):
            value = getattr(self, key)
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
            require(ok, f"task.{key}", value, f"a whole number of at least {least}")
        require(self.context <= self.tokens - 2, "task.context", self.context, f"at most tokens - 2 = {self.tokens - 2}")
        ok = self.start is None or (isinstance(self.start, int) and self.start >= 0)
        require(ok, "task.start", self.start, "a token offset in the corpus, 0 or more, or null")

    def examples(self, tokens: Tokens, corpus: Corpus | None, seed: int) -> Sequence[Example]:
        """One example a document: its text, which gives exactly `tokens` ids.

        Raises:
            UserError: the corpus is too short.
        """
        assert corpus is not None
        texts = [text for text in corpus.documents() if text.strip()]
        if self.start is not None:
            places = [(0, 0)]
            texts = ["\n".join(texts)]
        else:
            places = self._places(texts, seed)
        return [self._example(tokens, texts[at], offset, corpus.name, f"{at}-{offset}", at) for at, offset in places]

    def _places(self, texts: Sequence[str], seed: int) -> list[tuple[int, int]]:
        """(document, character offset) pairs; long documents first, each once before any is used twice."""
        need = self.tokens * 8  # characters: more than the tokens will take
        usable = [i for i, text in enumerate(texts) if len(text) >= need]
        if not usable:
            longest = max(map(len, texts), default=0)
            raise UserError(
                f"task.tokens={self.tokens} is too long for the corpus: its longest document has {longest} characters, "
                f"about {longest // 8} tokens are safe"
            )
        out = []
        for i in range(self.documents):
            draw = random.Random(hashlib.sha256(f"stream {seed} {self.tokens} {i}".encode()).digest())
            shuffled = random.Random(f"{seed} {i // len(usable)}").sample(usable, len(usable))
            at = shuffled[i % len(usable)]
            out.append((at, draw.randrange(len(texts[at]) - need + 1)))
        return out

    def _example(self, tokens: Tokens, text: str, offset: int, corpus: str, name: str, at: int) -> Example:
        if self.start is None:
            begin = text.find(" ", offset) + 1 if offset else 0  # a whole word first
            piece = text[begin : begin + self.tokens * 8]
            ids = tokens.encode(piece)
        else:
            ids = tokens.encode(text)[self.start :]
        room = self.tokens - (len(tokens.prompt("a", "", "", chat=False).ids) - len(tokens.encode("a")))
        if len(ids) < room:
            raise UserError(f"task.tokens={self.tokens} is too long: {corpus} has {len(ids)} tokens from there")
        return Example(
            id=f"{corpus}-{name}-{self.tokens}",
            group_id=f"{corpus}-{at}-{offset}",
            context=_text_of(tokens, ids, room),
            question="",
            answer_prefix="",
            answers=(),
            length=self.tokens,
            max_new_tokens=1,
        )

    def score(self, example: Example, answer: str) -> Score:
        """A stream is scored by the model's own probabilities, not by an answer."""
        raise NotImplementedError("a stream has no answer to score")


def _text_of(tokens: Tokens, ids: Sequence[int], n: int) -> str:
    """The longest text whose ids are exactly n: cutting ids may split a character, so the cut moves until it fits."""
    for extra in range(16):
        text = tokens.decode(ids[: n + extra])
        while len(tokens.encode(text)) > n:
            text = text[:-1]
        if len(tokens.encode(text)) == n:
            return text
    raise UserError("the tokenizer cannot cut this text to an exact number of tokens")
