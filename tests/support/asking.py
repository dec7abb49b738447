"""Requests through the scheduler, all at once: results in the order they end, and what lm-eval would make of windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from harness.engine.engine import Engine
from harness.engine.owners import by_owner
from harness.engine.requests import Request, Result
from harness.engine.scheduler import Scheduler
from harness.lm_eval.documents import Response, firsts, nothing, read, requests_of, responses
from harness.lm_eval.encoding import LmEvalRequest, Window
from harness.models.tokenizer import Tokenizer
from harness.stages.stack import Stack

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Reply(Generic[Owner]):
    """What became of a document; the first of its results that is not ok says its status."""

    requests: Sequence[LmEvalRequest]
    results: Sequence[Result[Owner]]

    @property
    def _worst(self) -> Result[Owner]:
        return next((one for one in self.results if one.status != "ok"), self.results[0])

    @property
    def status(self) -> str:
        return self._worst.status

    @property
    def error(self) -> str | None:
        return self._worst.error

    @property
    def trace(self) -> str:
        return self._worst.trace

    @property
    def responses(self) -> tuple[Response, ...]:
        tokens: Tokenizer = None  # type: ignore[assignment]  # nothing is generated
        return responses(self.requests, self.results, tokens)

    @property
    def scored(self) -> int:
        return read(self.results).scored

    @property
    def exercised(self) -> int:
        return read(self.results).exercised

    @property
    def nothing(self) -> bool:
        return nothing(self.requests, self.results)

    @property
    def main(self) -> Result[Owner]:
        return max(firsts(self.requests, self.results), key=lambda one: one.start.seen)


def results(engine: Engine, requests: Iterable[Request[Owner]], limit: int = 1 << 30) -> list[Result[Owner]]:
    return [one for batch in Scheduler(engine, limit).run(requests) for one in batch]


def owned(engine: Engine, requests: Iterable[Request[Owner]], limit: int = 1 << 30) -> dict[Owner, Result[Owner]]:
    return {one.request.owner: one for one in results(engine, requests, limit)}


def document(
    engine: Engine, requests: Sequence[LmEvalRequest], stacks: Sequence[Stack], limit: int = 1 << 30
) -> list[Reply[int]]:
    """A reply per stack."""
    tokens: Tokenizer = None  # type: ignore[assignment]  # nothing is generated
    asked = requests_of([(list(enumerate(stacks)), requests)], tokens)
    batches = by_owner(Scheduler(engine, limit).run(asked), lambda at: at)
    found = {at: Reply(requests, one) for batch in batches for at, one in batch}
    return [found[at] for at in range(len(stacks))]


def windows(engine: Engine, texts: Sequence[Window], stacks: Sequence[Stack]) -> list[Reply[int]]:
    """A text scored as a whole, in these windows."""
    return document(engine, [LmEvalRequest(kind="loglikelihood", windows=tuple(texts))], stacks)
