"""A document of lm-eval as requests of our engine, and their results as lm-eval's three shapes of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from harness.engine.batches import MOST_TOGETHER
from harness.engine.requests import Question, Request, Result, WindowText, draw_seed
from harness.engine.windows import first_half
from harness.lm_eval.encoding import LmEvalRequest, answer_text, stopper
from harness.models.tokenizer import Tokenizer
from harness.stages.stack import Stack

Response = str | float | tuple[float, bool]
Owner = TypeVar("Owner")
Asked = tuple[Owner, Stack]  # who asks a document's requests, and of which stack
Document = tuple[Sequence[Asked[Owner]], Sequence[LmEvalRequest]]  # what all that ask of one have in common stands once
BUNDLE = 4 * MOST_TOGETHER  # documents times stacks that are asked at once: what is not asked is free for other writers


@dataclass(frozen=True, kw_only=True)
class Reply(Generic[Owner]):
    """What became of a document under a stack: a response per request of lm-eval where `status` is ok, else why not.

    results: of each context, and of the first window of each text. scored and exercised count predicted tokens of windows, and
    those of them that were read through the stack's store.
    """

    responses: tuple[Response, ...] = ()
    results: tuple[Result[Owner], ...] = ()
    status: str = "ok"
    error: str | None = None
    trace: str = ""
    scored: int = 0
    exercised: int = 0

    @property
    def touched(self) -> int:
        """Entries evicted or stored inexactly, over all contexts and texts, as `Result.entries`."""
        return sum(one.entries for one in self.results)

    @property
    def nothing(self) -> bool:
        """Whether no token was predicted from a store that had lost something, though the stack compresses."""
        compresses = any(one.request.stack.compresses for one in self.results)
        return compresses and not self.exercised and not any(one.touched for one in self.results)

    @property
    def main(self) -> Result[Owner]:
        """The one with the longest context: what bytes are reported of."""
        return max(self.results, key=lambda one: one.start.seen)


def questions(asked: Sequence[Asked[Owner]], requests: Sequence[LmEvalRequest], tokens: Tokenizer) -> Iterator[Request[Owner]]:
    """What is asked on a document's contexts; requests on one context are neighbours, and its targets share one of them."""
    count = _count(requests)
    for index, (ids, at) in enumerate(_contexts(requests)):
        first = requests[at[0]]
        for owner, stack in asked:
            yield Question(
                owner=owner,
                prefix=ids[:-1],
                held=ids[-1:],
                stack=stack,
                seed=draw_seed(ids[:-1]),
                max_new=first.max_new,
                stop=stopper(tokens, first.until),
                targets=tuple(requests[i].target for i in at if requests[i].target),
                index=index,
                count=count,
            )


def texts(asked: Sequence[Asked[Owner]], requests: Sequence[LmEvalRequest]) -> Iterator[Request[Owner]]:
    """The windows of a document's texts; those of one window are neighbours."""
    windows = [window for request in requests for window in request.windows]
    count = _count(requests)
    for index, window in enumerate(windows, count - len(windows)):
        prefix = first_half(window.ids)
        for owner, stack in asked:
            yield WindowText(
                owner=owner,
                prefix=prefix,
                ids=window.ids,
                scored=window.scored,
                stack=stack,
                seed=draw_seed(prefix),
                index=index,
                count=count,
            )


def requests_of(documents: Iterable[Document[Owner]], tokens: Tokenizer) -> Iterator[Request[Owner]]:
    """All that documents ask, a bundle of them at a time: first on contexts, then windows, so that batches are of one kind."""
    left = iter(documents)
    while first := next(left, None):
        bundle, size = [first], len(first[0])
        while size < BUNDLE and (more := next(left, None)):
            bundle.append(more)
            size += len(more[0])
        for asked, requests in bundle:
            yield from questions(asked, requests, tokens)
        for asked, requests in bundle:
            yield from texts(asked, requests)


def reply(requests: Sequence[LmEvalRequest], results: Sequence[Result[Owner]], tokens: Tokenizer) -> Reply[Owner]:
    """What a document's results, in the order of its requests, answer; the first that has no answer decides its status."""
    for one in results:
        if one.status != "ok":
            return Reply(status=one.status, error=one.error, trace=one.trace)
    contexts = _contexts(requests)
    found: dict[int, Response] = {}
    of_contexts, of_windows = results[: len(contexts)], iter(results[len(contexts) :])
    for (_, at), one in zip(contexts, of_contexts, strict=True):
        found |= zip(at, _answers([requests[i] for i in at], one, tokens), strict=True)
    shown = [*of_contexts]
    scored = exercised = 0
    for i, request in enumerate(requests):
        if request.windows:
            own = [next(of_windows) for _ in request.windows]
            read = [one.text for one in own if one.text is not None]
            total = sum(text.total for text in read)
            greedy = all(text.greedy for text in read)
            found[i] = total if request.kind == "loglikelihood_rolling" else (total, greedy)
            scored, exercised = scored + sum(t.scored for t in read), exercised + sum(t.exercised for t in read)
            shown.append(own[0])
    responses = tuple(found[i] for i in range(len(requests)))
    return Reply(responses=responses, results=tuple(shown), scored=scored, exercised=exercised)


def _answers(requests: Sequence[LmEvalRequest], one: Result[Owner], tokens: Tokenizer) -> Iterable[Response]:
    """Responses to the requests on one context."""
    if one.answer:
        return [answer_text(tokens, one.answer.ids, requests[0].until)] * len(requests)
    return [(sum(scored.logp), scored.greedy) for scored in one.scored]


def _count(requests: Sequence[LmEvalRequest]) -> int:
    return len(_contexts(requests)) + sum(len(request.windows) for request in requests)


def _contexts(requests: Sequence[LmEvalRequest]) -> list[tuple[tuple[int, ...], list[int]]]:
    """(context, requests on it) in order; targets on one context are together, generations with the same settings too."""
    found: dict[tuple[tuple[int, ...], tuple[str, ...], int], list[int]] = {}
    for i, request in enumerate(requests):
        if not request.windows:
            found.setdefault((request.ids, request.until, request.max_new), []).append(i)
    return [(key[0], at) for key, at in found.items()]
