"""A refusal is told and ends nothing but what it is about: of a launcher, of a whole run, of an answer made again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import pytest

from harness import verify
from harness.command import execute
from harness.errors import UserError
from harness.sweep import job, outcome
from harness.sweep.fold import Job
from harness.sweep.outcome import Outcome
from harness.sweep.relaunch import run_all
from tests.support.record_factory import make

pytestmark = pytest.mark.usefixtures("composing", "composed_once")
ONE, TWO = Job(("seed=0",)), Job(("seed=1",))


def test_a_launcher_that_refuses_later_on_loses_no_outcome(tmp_path: Path) -> None:
    """Kind: the second launch of a sweep raised, and what the first had made was not reported."""
    batches: list[int] = []

    def launch(jobs: Sequence[Sequence[str]], first: int) -> None:
        batches.append(len(jobs))
        if len(batches) > 1:
            raise UserError("hydra.launcher: the queue is closed")
        outcome.start(tmp_path / str(first))
        outcome.end(tmp_path / str(first), Outcome(status="ok"))  # and the second job is never started

    ended = {" ".join(one.job.overrides): one.outcome for one in run_all([ONE, TWO], launch, tmp_path, lambda line: None)}
    assert batches == [2, 1]
    assert ended["seed=0"].status == "ok"
    assert ended["seed=1"].status == "crashed" and "the queue is closed" in ended["seed=1"].reason


def test_a_launcher_that_refuses_at_once_is_one_line(tmp_path: Path) -> None:
    def launch(jobs: Sequence[Sequence[str]], first: int) -> None:
        raise UserError("hydra.launcher: no such queue")

    with pytest.raises(UserError, match="no such queue"):
        run_all([ONE, TWO], launch, tmp_path, lambda line: None)


def run(folder: Path, *overrides: str) -> tuple[Path, int]:
    given = ["model=tiny_llama", "corpus=stdlib", "limit=1", "progress=false", "task.lengths=[200]", f"results_dir={folder}"]
    given += overrides
    return execute(hydra.compose("config", overrides=given), given)


NONE = ["compress=sink_h2o", "compress.keep.sinks=9000"]
SOME = ["stacks=[int8,[sink_h2o,'compress.keep.sinks=9000']]"]


@pytest.mark.parametrize("stacks, bad", [(NONE, 4), (SOME, 0)], ids=["all", "some"])
def test_a_run_of_which_everything_was_refused_is_no_success(
    stacks: list[str], bad: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kind: exit code 0 of a run that measured nothing that was asked for; the full cache is always there."""
    assert run(tmp_path, *stacks)[1] == bad
    printed = capsys.readouterr().out
    assert ("all 4 records were refused" in printed) == bool(bad)
    again = job.run(tmp_path / "job", lambda: run(tmp_path, *stacks))  # as a job of a sweep, with nothing left to do
    assert (again.status, "refused" in again.reason) == (("failed", True) if bad else ("ok", False))


ANSWER = {"output": "another", "score": 0.0, "kv_bytes_final": 10}


@pytest.mark.parametrize("changes, alone", [(ANSWER, True), (ANSWER | {"tokens_kept": 3.0}, False), ({}, False)])
def test_a_difference_of_the_answer_alone_is_told_apart(changes: dict[str, Any], alone: bool) -> None:
    old = make(stack="int8")
    assert verify.answer_alone(old, {**old, **changes}) == alone
    assert not verify.answer_alone(old, None)


@pytest.mark.parametrize("answers", [0, 1])
def test_verify_says_why_an_answer_may_differ(
    answers: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kind: "1 differing" of a run that nobody touched, without a word on what decodes beside an answer."""
    found = verify.Verdict(checked=2, different=["int8 {} a seed 0: output was 'x', now 'y'"], answers=answers, other_version=0)
    monkeypatch.setattr(verify, "verify", lambda *given: found)
    assert verify.main(["run"]) == 1
    printed = capsys.readouterr().out
    assert ("1 of them in the answer alone" in printed and "nearly tie" in printed) == bool(answers)
    assert printed.endswith("1 equal, 1 differing\n")
