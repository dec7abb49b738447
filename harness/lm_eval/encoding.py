"""lm-eval's requests as token ids, encoded as lm-eval's own `hf` model does.

A context is one text. Its last token is held back until the rest was compressed, so that every answer token is predicted
by a forward that reads the compressed cache. A text that is scored as a whole has no context: it becomes windows, which
are read in two parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError, require
from harness.models.tokenizer import Tokenizer

MOST_ANSWER = 256  # tokens, where a task sets no max_gen_toks: what lm-eval's hf model takes
_LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NO_EFFECT = ("do_sample", "temperature", "top_p", "top_k", "until")  # on greedy decoding


@dataclass(frozen=True)
class Window:
    """Ids read in order, of which the last `scored` are predicted."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True, kw_only=True)
class LmEvalRequest:
    """One request of lm-eval: a context followed by generation or by a target, or windows of a text scored as a whole.

    `kind` is lm-eval's: generate_until, loglikelihood or loglikelihood_rolling. `until` ends with the EOS text.
    """

    kind: str
    ids: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    until: tuple[str, ...] = ()
    max_new: int = 0
    windows: tuple[Window, ...] = ()
    truncated: bool = False

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Everything that is fed, in order."""
        return (*self.ids, *self.target, *(i for window in self.windows for i in window.ids))


def prompt_hash(requests: Sequence[LmEvalRequest]) -> str:
    """SHA-256 of the ids of all requests of a document."""
    return hashlib.sha256(repr([(r.kind, r.ids, r.target, r.windows) for r in requests]).encode()).hexdigest()


@dataclass(frozen=True)
class Encoder:
    """Texts to requests for one model.

    Args:
        tokens: the model's tokenizer.
        max_length: positions of the model.
        truncate: a prompt beyond them: refuse, or left to cut its beginning off.
    """

    tokens: Tokenizer
    max_length: int
    truncate: str = "refuse"

    def __call__(self, instance: Any) -> LmEvalRequest:
        """Encode an lm-eval Instance.

        Raises:
            UserError: sampling, beams or images asked for, a prompt too long or too short.
        """
        rolling, texts = instance.request_type == "loglikelihood_rolling", instance.args
        fits = len(texts) == (1 if rolling else 2) and isinstance(texts[0], str)
        require(fits, "task.name", instance.task_name, f"it asks for something that is no text: {texts!r:.60}")
        if rolling:
            return self.rolling(texts[0])
        context, second = texts
        return self.generate(context, second) if instance.request_type == "generate_until" else self.score(context, second)

    def encode(self, text: str) -> list[int]:
        """Ids with the special tokens that the tokenizer puts in front; a BOS that the text brings is not doubled."""
        bos = self.tokens.hf.bos_token
        own = bool(bos) and text.startswith(bos)
        return list(self.tokens.hf.encode(text, add_special_tokens=not own, verbose=False))

    @property
    def first_id(self) -> int:
        """What the first token of a text without context is predicted from: BOS, or EOS where there is none."""
        hf = self.tokens.hf
        return int(hf.eos_token_id if hf.bos_token_id is None else hf.bos_token_id)

    def generate(self, context: str, settings: Mapping[str, Any]) -> LmEvalRequest:
        """A generation; `settings` is a task's generation_kwargs."""
        most, until = generation_limits(settings)
        room = self.max_length - most
        require(room > 1, "max_gen_toks", most, f"the model has {self.max_length} positions")
        ids, truncated = self._fit(self.encode(context), room, f"with {most} tokens of answer")
        require(len(ids) > 1, "context", context, "its last token is held back, so it needs two tokens")
        eos = self.tokens.hf.decode([self.tokens.hf.eos_token_id]) if self.tokens.hf.eos_token_id is not None else ""
        stops = tuple(dict.fromkeys(s for s in (*until, eos) if s))
        return LmEvalRequest(kind="generate_until", ids=ids, until=stops, max_new=most, truncated=truncated)

    def score(self, context: str, continuation: str) -> LmEvalRequest:
        """The log-likelihood of a continuation; spaces that end the context belong to the continuation."""
        if context == "":
            target = self.tokens.user.raw(continuation)  # as lm-eval's hf model does, control words and all
            known = target[:1] == [self.first_id]
            return self._whole("loglikelihood", target if known else [self.first_id, *target])
        spaces = len(context) - len(context.rstrip())
        head = context[: len(context) - spaces]
        first, everything = self.encode(head) if head else [], self.encode(context + continuation)
        target = everything[len(first) :]
        require(bool(target), "continuation", continuation, "it adds no token to its context")
        if not first:
            return self._whole("loglikelihood", [self.first_id, *target])
        ids, truncated = self._fit(first, self.max_length + 1 - len(target), f"with {len(target)} tokens of continuation")
        if len(ids) == 1:  # nothing is left to compress when its one token is held back
            windows = (Window((*ids, *target), len(target)),)
            return LmEvalRequest(kind="loglikelihood", windows=windows, truncated=truncated)
        return LmEvalRequest(kind="loglikelihood", ids=ids, target=tuple(target), truncated=truncated)

    def rolling(self, text: str) -> LmEvalRequest:
        """The log-likelihood of a text: lm-eval's windows, one BOS before the first."""
        return self._whole("loglikelihood_rolling", [self.first_id, *self._without_bos(self.encode(text))])

    def _without_bos(self, ids: list[int]) -> list[int]:
        return ids[1:] if ids[:1] == [self.first_id] else ids

    def _whole(self, kind: str, ids: Sequence[int]) -> LmEvalRequest:
        """Windows of at most max_length tokens in, each token after the first id predicted once, contexts not repeated
        in what is scored.
        """
        windows, done, most = [], 1, self.max_length
        while done < len(ids):
            end = min(len(ids), done + most)
            start = max(0, end - most - 1)
            windows.append(Window(tuple(ids[start:end]), end - done))
            done = end
        require(bool(windows), "text", "", "there is no token to score")
        return LmEvalRequest(kind=kind, windows=tuple(windows))

    def _fit(self, ids: list[int], room: int, what: str) -> tuple[tuple[int, ...], bool]:
        if len(ids) <= room:
            return tuple(ids), False
        if self.truncate == "refuse" or room < 1:
            raise UserError(
                f"a prompt of {len(ids)} tokens {what} is beyond the model's {self.max_length} positions: "
                "truncate=left cuts its beginning off"
            )
        return tuple(ids[-room:]), True


def generation_limits(settings: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """(most new tokens, stop strings) of a task's generation settings; UserError for what greedy decoding cannot do."""
    sampled = settings.get("do_sample") or (settings.get("do_sample") is None and float(settings.get("temperature") or 0) > 0)
    if sampled:
        shown = {k: settings[k] for k in ("do_sample", "temperature") if k in settings}
        raise UserError(f"generation_kwargs {shown} ask for sampling: answers are greedy here (set do_sample=false)")
    other = sorted(k for k in settings if k not in (*_NO_EFFECT, *_LENGTH_KEYS) and (k, settings[k]) != ("num_beams", 1))
    if other:
        allowed = ", ".join((*_LENGTH_KEYS, "until", "do_sample=false"))
        raise UserError(f"generation_kwargs {other} are not possible: allowed are {allowed}")
    most = next((settings[k] for k in _LENGTH_KEYS if settings.get(k) is not None), MOST_ANSWER)
    until = settings.get("until") or ()
    return int(most), (until,) if isinstance(until, str) else tuple(until)


def stopper(tokens: Tokenizer, until: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    """Whether the generated ids hold a stop string; special tokens count as their text."""

    def stop(ids: Sequence[int]) -> bool:
        text = tokens.hf.decode(list(ids))
        return any(s in text for s in until)

    return stop


def answer_text(tokens: Tokenizer, ids: Sequence[int], until: Sequence[str]) -> str:
    """Text before the first stop string, as lm-eval's hf model gives it: a stop string may be the very first thing."""
    text = str(tokens.hf.decode(list(ids), skip_special_tokens=True))
    return text[: min((at for s in until if (at := text.find(s)) >= 0), default=len(text))]
