"""Runs a task's questions through all cells and records the answers. It draws nothing and knows no storage format.

What is already in the store is not done again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from harness.configure.arms import Arm
from harness.engine.batches import one_line
from harness.engine.engine import Engine
from harness.engine.requests import Request, Result, lot
from harness.engine.scheduler import Scheduler
from harness.evaluation.recorder import Planned, Recorder, Setup, works_of
from harness.models.load import LM
from harness.records.store import Store
from harness.types import Example, Record, Score, Task


class Runner:
    """Makes the missing records of a run."""

    def __init__(self, lm: LM, engine: Engine, task: Task, store: Store[Planned], setup: Setup) -> None:
        self.lm, self.task, self.store, self.setup = lm, task, store, setup
        self.server = Scheduler(engine, setup.memory_limit, views=setup.views)

    def works(self, examples: Sequence[Example], cells: Sequence[Arm], seed: int) -> list[Planned]:
        """The records that all examples under all cells are."""
        tokens, chat = self.lm.tokens, self.task.chat
        prompts = [(e, tokens.prompt(e.context, e.question, e.answer_prefix, chat=chat)) for e in examples]
        return works_of(self.setup, self.task, prompts, cells, seed)

    def recorder(self, works: Sequence[Planned]) -> Recorder:
        """What writes these records."""
        return Recorder(self.task, self.store, self.setup, works, self._told)

    def _told(self, work: Planned) -> dict[str, Any]:
        """How the answer is chosen; choices are scored as they are."""
        return {} if work.example.choices else {"decoding": self.lm.decoding}

    def run(self, works: Sequence[Planned]) -> list[str]:
        """Make what is missing, a line for each failure; a wave's records are on disk before the next one starts."""
        with self.recorder(works) as recorder:

            def done(served: list[Result]) -> None:
                recorder.write([self._finish(recorder, one) for one in served])

            for free in recorder.rounds():
                self.server.serve(map(self._job, free), done)
            return recorder.failures

    def _job(self, work: Planned) -> Request:
        example = work.example
        first, held = work.prompt.split(self.task.query_aware)
        return Request(
            prefix=first,
            held=held,
            stack=work.cell.stack,
            max_new=example.max_new_tokens,
            stop=self._stop(example),
            targets=tuple(tuple(self.lm.tokens.encode(choice)) for choice in example.choices),
            seed=lot(first),
            tag=work,
        )

    def _stop(self, example: Example) -> Callable[[Sequence[int]], bool]:
        if not example.stop:
            return lambda ids: False
        return lambda ids: self._cut(ids, example.stop)[1]

    def _cut(self, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, bool]:
        """(text before the first stop string, whether there was one); blanks in front of the answer do not stop it."""
        text = self.lm.tokens.decode(ids)
        blank = len(text) - len(text.lstrip())
        found = [at for s in stop if (at := text.find(s, blank)) >= 0]
        return (text[: min(found)], True) if found else (text, False)

    def _finish(self, recorder: Recorder, served: Result) -> Record:
        work: Planned = served.job.tag
        if served.status != "ok":
            return recorder.unserved(work, served)
        try:
            fields = self._answered(work.example, served) if served.answer else self._chosen(work.example, served)
        except Exception as error:  # a task's own mistake is one record's failure
            return recorder.failed(work, one_line(error), traceback.format_exc())
        return recorder.record(work, **recorder.measured(served), **fields)

    def _answered(self, example: Example, served: Result) -> dict[str, Any]:
        assert served.answer is not None
        text = self._cut(served.answer.ids, example.stop)[0]
        score = self.task.score(example, text)
        if not isinstance(score, Score):
            raise TypeError(f"task {self.task.name}: score() must return a Score, not {score!r}")
        return {"output": text, "stop_reason": served.answer.stop_reason, "score": score.value, "metrics": dict(score.metrics)}

    def _chosen(self, example: Example, served: Result) -> dict[str, Any]:
        """Multiple choice: the choice with the highest log-likelihood, and the one with the highest per byte beside it."""
        sums = [sum(s.logp) for s in served.scored]
        choice = example.choices[max(range(len(sums)), key=sums.__getitem__)]
        score = choose(example, sums)
        return {"output": choice, "score": score.value, "metrics": dict(score.metrics)}


def choose(example: Example, sums: Sequence[float]) -> Score:
    """Accuracy of the most likely choice, of the most likely per byte, and the log-likelihood of the right one."""

    def right(values: Sequence[float]) -> float:
        return float(example.choices[max(range(len(values)), key=values.__getitem__)] in example.answers)

    per_byte = [total / max(len(choice.encode()), 1) for total, choice in zip(sums, example.choices, strict=True)]
    gold = next(total for total, choice in zip(sums, example.choices, strict=True) if choice in example.answers)
    return Score(value=right(sums), metrics={"acc_norm": right(per_byte), "gold_logp": gold})
