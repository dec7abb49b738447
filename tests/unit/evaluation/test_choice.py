"""Multiple choice: what is compared with what."""

from __future__ import annotations

from harness.evaluation.question_runner import choose
from harness.types import Example


def example(**changes: object) -> Example:
    base = dict(id="1", context="c", question="q", answer_prefix="", answers=("yes",), choices=("yes", "certainly not"))
    return Example(**(base | changes))  # type: ignore[arg-type]


def test_the_most_likely_choice_counts_and_the_most_likely_per_byte_stands_beside_it() -> None:
    score = choose(example(), [-6.0, -13.0])  # per byte: -2.0 and -1.0
    assert (score.value, score.metrics["acc_norm"], score.metrics["gold_logp"]) == (1.0, 0.0, -6.0)
    score = choose(example(), [-6.0, -5.0])
    assert (score.value, score.metrics["acc_norm"]) == (0.0, 0.0)


def test_any_of_several_right_choices_counts() -> None:
    assert choose(example(answers=("no", "certainly not")), [-6.0, -5.0]).value == 1.0
