"""Every job of a sweep comes to an end, whatever a launcher does: raise, lose jobs, leave some unstarted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from harness.sweep import outcome
from harness.sweep.fold import Job
from harness.sweep.outcome import Outcome
from harness.sweep.relaunch import Ended, run_all

ONE, TWO, THREE = (Job((f"seed={n}",)) for n in range(3))
FOLDED = Job(("seed=9",), (("compress=a",), ("compress=bad",), ("compress=c",)))


class Engine:
    """A launcher; `behave` says for the overrides of a job whether it ends well, dies, is never started, or crashes with a word."""

    def __init__(self, sweep: Path, behave: Callable[[Sequence[str], int], str]) -> None:
        self.sweep, self.behave = sweep, behave
        self.launched: list[list[str]] = []

    def __call__(self, overrides: Sequence[Sequence[str]], first: int) -> None:
        self.launched.append([" ".join(job) for job in overrides])
        ends = [self.behave(job, len(overrides)) for job in overrides]
        for number, end in enumerate(ends, start=first):
            if end != "unstarted":
                outcome.start(self.sweep / str(number))
            if end in ("ok", "crashed"):
                outcome.end(self.sweep / str(number), Outcome(status=end, reason="" if end == "ok" else "SIGKILL"))
        if any(end != "ok" for end in ends):
            raise RuntimeError("a worker is gone")


def run(sweep: Path, jobs: Sequence[Job], behave: Callable[[Sequence[str], int], str]) -> tuple[dict[str, str], Engine]:
    engine = Engine(sweep, behave)
    ended: list[Ended] = run_all(jobs, engine, sweep, lambda line: None)
    assert len({one.number for one in ended}) == len(ended)
    return {" ".join(one.job.overrides): one.outcome.status for one in ended}, engine


def test_a_sweep_that_goes_well_is_launched_once(tmp_path: Path) -> None:
    ended, engine = run(tmp_path, [ONE, TWO], lambda job, n: "ok")
    assert ended == {"seed=0": "ok", "seed=1": "ok"}
    assert len(engine.launched) == 1


def test_neighbours_of_a_job_that_died_finish(tmp_path: Path) -> None:
    def pool(job: Sequence[str], together: int) -> str:
        if "seed=0" in job:
            return "dies"
        return "dies" if together == 3 and "seed=1" in job else "unstarted" if together == 3 else "ok"

    ended, engine = run(tmp_path, [ONE, TWO, THREE], pool)
    assert ended == {"seed=0": "crashed", "seed=1": "ok", "seed=2": "ok"}
    assert engine.launched == [["seed=0", "seed=1", "seed=2"], ["seed=0"], ["seed=1"], ["seed=2"]]


def test_of_a_folded_job_only_the_culprit_is_lost(tmp_path: Path) -> None:
    for end, rounds in (("crashed", 2), ("dies", 4)):  # with a word: together again; without: each alone
        bad = lambda job, n, end=end: end if "bad" in " ".join(job) else "ok"  # noqa: E731
        ended, engine = run(tmp_path / end, [FOLDED], bad)
        assert ended == {"seed=9 compress=a": "ok", "seed=9 compress=bad": "crashed", "seed=9 compress=c": "ok"}
        assert len(engine.launched) == rounds


def test_a_launcher_that_starts_nothing_is_not_asked_for_ever(tmp_path: Path) -> None:
    ended, engine = run(tmp_path, [ONE, TWO], lambda job, n: "unstarted")
    assert ended == {"seed=0": "crashed", "seed=1": "crashed"}
    assert len(engine.launched) == 1
