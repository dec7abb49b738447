"""Answers a document's requests under many stacks: shared prefills, lockstep waves, windows read in two parts.

It knows token ids, stacks and lm-eval's three shapes of an answer; no record and no metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from harness.engine.engine import Engine
from harness.engine.requests import Request, Result, lot
from harness.engine.scheduler import Scheduler
from harness.lm_eval.encoding import LmEvalRequest, answer_text, stopper
from harness.lm_eval.windows import WindowReader, WindowServed
from harness.models.tokenizer import Tokenizer
from harness.stages.stack import Stack

Response = str | float | tuple[float, bool]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """All requests of one document, for one stack. Those of one document stand together and share `requests`."""

    requests: tuple[LmEvalRequest, ...]
    stack: Stack
    tag: Any = None


@dataclass
class Replied:
    """What became of it: a response per request where `status` is ok, else why not.

    scored and exercised count predicted tokens of windows, and those of them that were read through the stack's store.
    """

    asked: Asked
    responses: list[Response | None]
    served: list[Result] = field(default_factory=list)
    status: str = "ok"
    error: str | None = None
    trace: str = ""
    scored: int = 0
    exercised: int = 0
    missing: int = 0

    @property
    def touched(self) -> int:
        """Entries evicted or stored inexactly, over all requests, as `Result.entries`."""
        return sum(s.entries for s in self.served)

    @property
    def nothing(self) -> bool:
        """Whether no token was predicted from a store that had lost something, though the stack compresses."""
        return self.asked.stack.compresses and not self.exercised and not any(s.touched for s in self.served)

    @property
    def main(self) -> Result:
        """The one with the longest context: what bytes are reported of."""
        return max(self.served, key=lambda s: s.row.seen if s.row else 0)


class LmEvalService:
    """Serves documents of lm-eval through an engine."""

    def __init__(self, engine: Engine, tokens: Tokenizer, memory_limit: int, *, views: bool = True) -> None:
        self.tokens = tokens
        self.server = Scheduler(engine, memory_limit, views=views)
        self.windows = WindowReader(engine, self.server.forecast, memory_limit)

    def serve(self, asked: Sequence[Asked], done: Callable[[list[Replied]], Any]) -> None:
        """Answer everything; `done` gets what a wave completed as soon as it ends."""
        replies = [Replied(one, [None] * len(one.requests)) for one in asked]
        for reply in replies:
            reply.missing = len(_contexts(reply.asked)) + sum(bool(r.windows) for r in reply.asked.requests)

        def finish(served: Sequence[Result]) -> None:
            done([reply for one in served if (reply := self._collect(one)).missing == 0])

        self.server.serve(self._jobs(replies), finish)
        for same in _by_document(replies):
            for at, request in enumerate(same[0].asked.requests):
                if request.windows:
                    results = self.windows.read(request.windows, [r.asked.stack for r in same])
                    for reply, result in zip(same, results, strict=True):
                        _collect_window(reply, at, result)
                    done([reply for reply in same if reply.missing == 0])

    def _jobs(self, replies: Sequence[Replied]) -> Iterator[Request]:
        """Jobs of one context side by side: every stack reads the same prefill; targets on it share a job."""
        for same in _by_document(replies):
            for ids, at in _contexts(same[0].asked):
                requests = [same[0].asked.requests[i] for i in at]
                for reply in same:
                    yield Request(
                        prefix=ids[:-1],
                        held=ids[-1:],
                        stack=reply.asked.stack,
                        seed=lot(ids[:-1]),
                        max_new=requests[0].max_new,
                        stop=stopper(self.tokens, requests[0].until),
                        targets=tuple(r.target for r in requests if r.target),
                        tag=(reply, at),
                    )

    def _collect(self, served: Result) -> Replied:
        reply: Replied = served.job.tag[0]
        at: list[int] = served.job.tag[1]
        reply.missing -= 1
        reply.served.append(served)
        if served.status != "ok":
            reply.status, reply.error, reply.trace = served.status, served.error, served.trace
        elif served.answer:
            text = answer_text(self.tokens, served.answer.ids, reply.asked.requests[at[0]].until)
            for i in at:
                reply.responses[i] = text
        else:
            for i, scored in zip(at, served.scored, strict=True):
                reply.responses[i] = (sum(scored.logp), scored.greedy)
        return reply


def _collect_window(reply: Replied, at: int, result: WindowServed) -> None:
    reply.missing -= 1
    reply.served.append(result.served)
    if result.served.status != "ok":
        reply.status, reply.error, reply.trace = result.served.status, result.served.error, result.served.trace
        return
    rolling = reply.asked.requests[at].kind == "loglikelihood_rolling"
    reply.responses[at] = result.logp if rolling else (result.logp, result.greedy)
    reply.scored += result.scored
    reply.exercised += result.exercised


def _by_document(replies: Sequence[Replied]) -> Iterator[list[Replied]]:
    for _, same in groupby(replies, key=lambda r: id(r.asked.requests)):
        yield list(same)


def _contexts(asked: Asked) -> list[tuple[tuple[int, ...], list[int]]]:
    """(context, requests on it) in order; targets on one context stand together, generations with the same settings too."""
    found: dict[tuple[tuple[int, ...], tuple[str, ...], int], list[int]] = {}
    for i, request in enumerate(asked.requests):
        if not request.windows:
            found.setdefault((request.ids, request.until, request.max_new), []).append(i)
    return [(key[0], at) for key, at in found.items()]
