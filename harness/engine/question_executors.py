"""Questions on a context: greedy answers, and log-likelihoods of given continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.engine.answers import Ask
from harness.engine.executor import Executor, batch_timings
from harness.engine.logits import UNSOUND
from harness.engine.requests import Owner, Question, Request, Result, failed
from harness.kv.memory import Budget


class Questions(Executor):
    """What answers and targets have in common."""

    def own(self, request: Request[Owner], budget: Budget) -> int:
        """Bytes of a sequence cache for every target, for each is scored on a fork of its own, and of every logit."""
        asked = _question(request)
        size = asked.forks * self.forecast.cache(asked.stack, budget, asked.budgeted, asked.growth)
        return size + 4 * self.forecast.vocabulary * sum(len(asked.held) + len(target) for target in asked.targets)

    def base(self, request: Request[Owner]) -> int:
        return 0 if request.stack.chunked else self.forecast.prefix(len(request.prefix))

    def kept(self, request: Request[Owner]) -> int:
        """A cache that nothing is lost of keeps the prefix alive."""
        return 0 if request.stack.compresses else self.forecast.prefix(len(request.prefix))


class Answers(Questions):
    """Greedy decoding."""

    def run(self, batch: Sequence[Result[Owner]], views: int) -> list[Result[Owner]]:
        asks = [
            Ask(row=one.start, held=asked.held, max_new=asked.max_new, stop=asked.stop)
            for one in batch
            for asked in (_question(one.request),)
        ]
        answers = self.engine.answer(asks, views)
        return [
            replace(one, answer=a, timings=one.timings | batch_timings(a.seconds, len(batch)))
            if a.stop_reason != "unsound"
            else failed(one, UNSOUND, "")
            for one, a in zip(batch, answers, strict=True)
        ]


class Targets(Questions):
    """The log-likelihood of given continuations."""

    def run(self, batch: Sequence[Result[Owner]], views: int) -> list[Result[Owner]]:
        begin = self.engine.clock()
        asked = [(one, _question(one.request)) for one in batch]
        forks = [(one.start, question.held, target) for one, question in asked for target in question.targets]
        scores = iter(
            self.engine.score([cache for cache, *_ in forks], [held for _, held, _ in forks], [target for *_, target in forks])
        )
        found = [tuple(next(scores) for _ in question.targets) for _, question in asked]
        timings = batch_timings(self.engine.clock() - begin, len(forks))
        return [
            replace(one, scored=scored, timings=one.timings | timings)
            if all(score.sound for score in scored)
            else failed(one, UNSOUND, "")
            for one, scored in zip(batch, found, strict=True)
        ]


def _question(request: Request[Owner]) -> Question[Owner]:
    assert isinstance(request, Question)
    return request
