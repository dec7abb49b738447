"""The loop: for what is claimed, for what of it has ended, append the records."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from harness.configure.arms import Arm
from harness.engine.batches import one_line
from harness.engine.owners import by_owner
from harness.engine.requests import Request, Result
from harness.engine.scheduler import Scheduler
from harness.evaluation.planned import Planned
from harness.evaluation.recorder import Recorder
from harness.types import Example, Record


class Runner(Protocol):
    """A kind of task: what is to be made, what is asked for it, and the record of what came of that."""

    def pending(self, examples: Sequence[Example], arms: Sequence[Arm], seed: int) -> list[Planned]:
        """The records that all examples under all arms are."""
        ...

    def requests(self, planned: Iterable[Planned]) -> Iterator[Request[Planned]]:
        """What these records ask, those on one context as neighbours; `planned` is read as it is needed."""
        ...

    def record(self, planned: Planned, results: Sequence[Result[Planned]]) -> Record:
        """The record of what was asked for it, all of which is ok; what this raises is that record's failure."""
        ...

    def finish(self, planned: Sequence[Planned]) -> None:
        """What a run leaves beside its records, once they are there."""
        ...


def evaluate(runner: Runner, scheduler: Scheduler, recorder: Recorder) -> list[str]:
    """Make what is missing; a line for each failure. The records of a batch are on disk before the next one starts."""
    with recorder:
        for claimed in recorder.rounds():
            for ended in by_owner(scheduler.run(runner.requests(claimed)), lambda planned: planned.key):
                recorder.write([_record(runner, recorder, planned, results) for planned, results in ended])
                del ended  # its caches go before the next batch begins
        runner.finish(recorder.planned)
    return recorder.failures


def _record(runner: Runner, recorder: Recorder, planned: Planned, results: Sequence[Result[Planned]]) -> Record:
    for one in results:
        if one.status == "refused":
            return recorder.refused(planned, one.error or "")
        if one.status != "ok":
            return recorder.failed(planned, one.error or "", one.trace)
    try:
        return runner.record(planned, results)
    except Exception as error:  # a task's or a metric's own mistake is one record's failure
        return recorder.failed(planned, one_line(error), traceback.format_exc())
