"""A document of lm-eval as requests of our engine, and their results as lm-eval's three shapes of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from harness.engine.answers import TextScore
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


def responses(requests: Sequence[LmEvalRequest], results: Sequence[Result[Owner]], tokens: Tokenizer) -> tuple[Response, ...]:
    """What a document's results, all ok and in the order of its requests, answer: a response for each of lm-eval's requests."""
    contexts = _contexts(requests)
    found: dict[int, Response] = {}
    for (_, at), one in zip(contexts, results[: len(contexts)], strict=True):
        found |= zip(at, _answers([requests[i] for i in at], one, tokens), strict=True)
    windows = iter(results[len(contexts) :])
    for i, request in enumerate(requests):
        if request.windows:
            text = read([next(windows) for _ in request.windows])
            found[i] = text.total if request.kind == "loglikelihood_rolling" else (text.total, text.greedy)
    return tuple(found[i] for i in range(len(requests)))


def read(results: Iterable[Result[Owner]]) -> TextScore:
    """The tokens that the windows among a document's results scored, all in one."""
    return sum((one.text for one in results if one.text is not None), TextScore())


def firsts(requests: Sequence[LmEvalRequest], results: Sequence[Result[Owner]]) -> list[Result[Owner]]:
    """Of a document's results those on a context, and that on the first window of each text."""
    at = len(_contexts(requests))
    found = [*results[:at]]
    for request in requests:
        found += results[at : at + 1] if request.windows else []
        at += len(request.windows)
    return found


def nothing(requests: Sequence[LmEvalRequest], results: Sequence[Result[Owner]]) -> bool:
    """Whether no token of a document was predicted from a store that had lost something, though the stack compresses."""
    compresses = any(one.request.stack.compresses for one in results)
    return compresses and not read(results).exercised and not any(one.touched for one in firsts(requests, results))


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
