"""Requests through the scheduler, all at once: results in the order they end, and what lm-eval would make of windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from harness.engine.engine import Engine
from harness.engine.owners import by_owner
from harness.engine.requests import Request, Result
from harness.engine.scheduler import Scheduler
from harness.lm_eval.documents import Reply, reply, requests_of
from harness.lm_eval.encoding import LmEvalRequest, Window
from harness.models.tokenizer import Tokenizer
from harness.stages.stack import Stack

Owner = TypeVar("Owner")


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
    found = {at: reply(requests, one, tokens) for batch in batches for at, one in batch}
    return [found[at] for at in range(len(stacks))]


def windows(engine: Engine, texts: Sequence[Window], stacks: Sequence[Stack]) -> list[Reply[int]]:
    """A text scored as a whole, in these windows."""
    return document(engine, [LmEvalRequest(kind="loglikelihood", windows=tuple(texts))], stacks)
