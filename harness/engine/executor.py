"""What every kind of request has in common: how its context is read once, how it is sized, started and run.

The scheduler decides what runs together, and what becomes of errors.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import ClassVar

from harness.engine.answers import Prefix, Scored, TextScore
from harness.engine.batches import MOST_TOGETHER, Forecast
from harness.engine.engine import Engine
from harness.engine.requests import Owner, Request, Result
from harness.kv.memory import Budget
from harness.stages.protocols import Needs
from harness.stages.stack import Stack


@dataclass(frozen=True)
class Context:
    """What is read once for all requests on one context: its exact cache, and the scores of its own tokens."""

    prefix: Prefix | None = None
    text: TextScore = field(default_factory=TextScore)
    end: Scored | None = None  # of a text that is read exactly as a whole


class Executor(ABC):
    """One kind of request. `exact`: every request of it needs the exact context, a chunked stack's too."""

    exact: ClassVar[bool] = False

    def __init__(self, engine: Engine, forecast: Forecast) -> None:
        self.engine, self.forecast = engine, forecast

    def budget(self, request: Request[Owner]) -> Budget:
        """The budget of the context; UserError when it is too small."""
        return self.forecast.solve(request.stack, request.budgeted)

    @abstractmethod
    def own(self, request: Request[Owner], budget: Budget) -> int:
        """Bytes that a request takes, whatever shares its batch."""

    def beside(self, request: Request[Owner], batch: Sequence[Request[Owner]]) -> int:
        """Bytes that are added for the sake of a request, given what is already in its batch."""
        return 0

    def base(self, request: Request[Owner]) -> int:
        """Bytes of the exact context, while requests on it start."""
        return 0

    def kept(self, request: Request[Owner]) -> int:
        """Bytes of the exact context that stay for a request until its batch has ended."""
        return 0

    def joins(self, request: Request[Owner], batch: Sequence[Request[Owner]]) -> bool:
        """Whether a request may join a batch that is not empty."""
        fits = sum(one.forks for one in batch) + request.forks <= MOST_TOGETHER
        return fits and type(request) is type(batch[0])

    def read(self, requests: Sequence[Request[Owner]]) -> Context:
        """Read the context of these requests once, exactly."""
        needs = needs_of(one.stack for one in requests)
        length = self.rotation(requests[0])
        ids = requests[0].prefix
        return Context(self.engine.prefill(ids, needs, length) if length else self.engine.prefill(ids, needs))

    def rotation(self, request: Request[Owner]) -> int:
        """Tokens of the whole text, where the model's rotation depends on it; else 0 for all."""
        return request.length if self.engine.rotary is not None else 0

    def start(self, request: Request[Owner], budget: Budget, context: Context) -> Result[Owner]:
        """A request whose context is compressed."""
        begin, prefix = time.perf_counter(), context.prefix
        assert prefix is not None
        cache = self.engine.compress(prefix, request.stack, request.seed, budget)
        timings = {"prefill_s": prefix.seconds, "compress_s": time.perf_counter() - begin}
        held = cache.bytes()
        peak = prefix.nbytes(request.stack.needs) + (held.total if request.stack.compresses else 0)
        return Result(request=request, row=cache, context=held, peak_prefill=peak, timings=timings)

    @abstractmethod
    def run(self, batch: Sequence[Result[Owner]], views: int) -> list[Result[Owner]]:
        """What becomes of started requests that run together; views: bytes for decoded copies, which change no bit."""


def needs_of(stacks: Iterable[Stack]) -> Needs:
    """What one prefill must record for all of these stacks."""
    return reduce(or_, (stack.needs for stack in stacks), Needs())


def batch_timings(seconds: float, together: int) -> dict[str, float]:
    """Of a batch, under the names that records have."""
    return {"batch_s": seconds, "batch_sequences": float(together)}
