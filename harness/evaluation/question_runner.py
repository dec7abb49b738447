"""Tasks of questions: an answer, or the likeliest of several choices, on every example under every arm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from harness.configure.arms import Arm
from harness.engine.answers import Answer, Scored
from harness.engine.requests import Question, Request, Result, draw_seed
from harness.evaluation.planned import Planned, Setup, plan
from harness.evaluation.record_fields import Fields
from harness.evaluation.record_maker import RecordMaker
from harness.models.load import LM
from harness.types import Example, Record, Score, Task


class QuestionRunner:
    """Makes the records of a task of questions."""

    def __init__(self, lm: LM, task: Task, setup: Setup) -> None:
        self.lm, self.task, self.setup = lm, task, setup
        self.maker = RecordMaker(task, setup)

    def pending(self, examples: Sequence[Example], arms: Sequence[Arm], seed: int) -> list[Planned]:
        """The records that all examples under all arms are."""
        tokens, chat = self.lm.tokens, self.task.chat
        prompts = [(e, tokens.prompt(e.context, e.question, e.answer_prefix, chat=chat)) for e in examples]
        return plan(self.setup, self.task, prompts, arms, seed, self._shared)

    def _shared(self, example: Example) -> Fields:
        """How the answer is chosen; choices are scored as they are."""
        return {} if example.choices else {"decoding": self.lm.decoding}

    def requests(self, planned: Iterable[Planned]) -> Iterator[Request[Planned]]:
        """One request a record."""
        for one in planned:
            example = one.example
            first, held = one.prompt.split(self.task.query_aware)
            yield Question(
                owner=one,
                prefix=first,
                held=held,
                stack=one.arm.stack,
                max_new=example.max_new_tokens,
                stop=self._stop(example),
                targets=tuple(tuple(self.lm.tokens.encode(choice)) for choice in example.choices),
                seed=draw_seed(first),
            )

    def record(self, planned: Planned, results: Sequence[Result[Planned]]) -> Record:
        """The record of an answer, or of the choice that is the most likely one."""
        (result,) = results
        example = planned.example
        fields = self._answered(example, result.answer) if result.answer else self._chosen(example, result.scored)
        return self.maker.record(planned, **self.maker.measured(result) | fields)

    def finish(self, planned: Sequence[Planned]) -> None:
        """Records are all there is."""

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

    def _answered(self, example: Example, answer: Answer) -> Fields:
        text = self._cut(answer.ids, example.stop)[0]
        score = self.task.score(example, text)
        if not isinstance(score, Score):
            raise TypeError(f"task {self.task.name}: score() must return a Score, not {score!r}")
        return {"output": text, "stop_reason": answer.stop_reason, "score": score.value, "metrics": dict(score.metrics)}

    def _chosen(self, example: Example, scored: Sequence[Scored]) -> Fields:
        """Multiple choice: the choice with the highest log-likelihood, and the one with the highest per byte beside it."""
        sums = [sum(s.logp) for s in scored]
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
