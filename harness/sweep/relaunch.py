"""Sees every job of a sweep to its end, whatever a launcher does with it. Jobs' folders say how they ended.

A launcher may raise at the first job that dies, take that job's neighbours down with it, or leave jobs unstarted. So:
what never started is launched again; a job of several stacks that died runs again stack by stack, so that only the
culprit is lost; a job of one stack that died beside others runs once more alone, which tells it from its neighbour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.engine.batches import one_line
from harness.errors import UserError
from harness.sweep import outcome
from harness.sweep.fold import Job
from harness.sweep.outcome import Outcome

Launch = Callable[[Sequence[Sequence[str]], int], object]


@dataclass(frozen=True)
class Ended:
    """A job that will not be run again, and how it went."""

    number: int
    job: Job
    outcome: Outcome


def run_all(jobs: Sequence[Job], launch: Launch, sweep: Path, say: Callable[[str], None]) -> list[Ended]:
    """Launch jobs until each has come to its end.

    Args:
        jobs: what to run.
        launch: a launcher's; (override lists, number of the first) -> anything, and it may raise.
        sweep: folder that holds a job's folder under its number.
        say: called with a line whenever jobs are launched again.

    Raises:
        UserError: the launcher refuses before any job began; later on that is the outcome of the jobs it was to run.
    """
    ended: list[Ended] = []
    batches, first = deque([list(jobs)]), 0
    while batches:
        batch = batches.popleft()
        numbered = list(enumerate(batch, start=first))
        first += len(batch)
        error = _launch(launch, batch, numbered[0][0])
        if isinstance(error, UserError) and not ended and not any(outcome.has_started(sweep / str(n)) for n, _ in numbered):
            raise error  # nothing was run, so nothing is lost: the sweep itself cannot be had
        against = one_line(error) if error and not isinstance(error, UserError) else str(error or "")
        unstarted: list[Job] = []
        divided: list[Job] = []
        for number, job in numbered:
            place = sweep / str(number)
            found, began = outcome.read(place), outcome.has_started(place)
            if found is not None and (found.status != "crashed" or len(job.stacks) < 2):
                ended.append(Ended(number, job, found))
            elif not began and len(batch) > 1 and any(outcome.has_started(sweep / str(n)) for n, _ in numbered):
                unstarted.append(job)
            elif began and len(job.stacks) > 1 and found is not None:
                say(f"job {number}: {found.reason}; its stacks run again one by one")
                divided += job.split()
            elif began and (len(job.stacks) > 1 or len(batch) > 1):
                said = f" ({against})" if against else ""
                say(f"job {number} ended without a word{said}; it runs again alone, stack by stack")
                batches.extend([one] for one in job.split() or [job])
            else:
                reason = ("ended without a word" if began else "never started") + (f" ({against})" if against else "")
                ended.append(Ended(number, job, Outcome(status="crashed", reason=reason)))
        batches.extend(again for again in (divided, unstarted) if again)
    return ended


def _launch(launch: Launch, batch: Sequence[Job], first: int) -> Exception | None:
    """What the launcher raised."""
    try:
        launch([job.overrides for job in batch], first)
    except Exception as error:  # whatever it is, the jobs' own folders say what became of them
        return error
    return None
