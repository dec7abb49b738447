"""Writes the records of one invocation, with failures on disk and progress on the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from tqdm import tqdm

from harness.evaluation.planned import Planned
from harness.evaluation.record_maker import RecordMaker
from harness.records.failures import naming, trace_file
from harness.records.store import Store
from harness.types import Record


class Recorder:
    """Use it as a context manager, which shows progress while it is open.

    The bar counts the records that were missing at the start, whoever makes them.
    """

    def __init__(self, maker: RecordMaker, store: Store[Planned], planned: Sequence[Planned]) -> None:
        self.maker, self.store, self.planned = maker, store, planned
        self.failures: list[str] = []
        self._left = {one.key: (one.seed, one.example.id) for one in store.missing(planned)}
        self._examples = Counter(self._left.values())  # records missing of each
        self._asked = len(self._examples)
        self.bar = tqdm(
            total=len(self._left),
            unit="rec",
            desc=maker.setup.run_id,
            disable=not maker.setup.progress or not self._left,
            mininterval=0.5,
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.close()

    def rounds(self) -> Iterator[Iterator[Planned]]:
        """What is missing and free, as `Store.rounds` hands it out: records of one claim are neighbours.

        Those that cannot be asked at all get their record here.
        """
        for free in self.store.rounds(self.planned):
            yield self._possible(one for claimed in free for one in claimed)
            self._show(())

    def _possible(self, planned: Iterable[Planned]) -> Iterator[Planned]:
        for one in planned:
            if one.arm.failure is not None:
                self.write([self.failed(one, *one.arm.failure)])
            elif reason := one.refusal or one.arm.refusal:
                self.write([self.refused(one, reason)])
            else:
                yield one

    def write(self, records: Sequence[Record]) -> None:
        """Append records to the store; failures are also remembered for the end."""
        self.store.append(records)
        self.failures += [f"{r.stack} {r.point} {r.example_id}: {r.error}" for r in records if r.status == "failed"]
        self._show([r.key for r in records])

    def _show(self, keys: Iterable[str]) -> None:
        """Take records off what is left, other writers' too, and move the bar."""
        gone = [key for key in {*keys, *self.store.others} if key in self._left]
        for key in gone:
            self._examples[self._left.pop(key)] -= 1
        done = sum(left <= 0 for left in self._examples.values())
        words = f"{done}/{self._asked} examples" + (f", {len(self.failures)} failed" if self.failures else "")
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update(len(gone))

    def failed(self, planned: Planned, line: str, trace: str) -> Record:
        """A record of a failure, its traceback in a file of the run folder."""
        if not trace:
            return self.maker.record(planned, status="failed", error=line)
        file = trace_file(planned.key)
        self.store.write(file, lambda path: path.write_text(trace, encoding="utf-8"))
        return self.maker.record(planned, status="failed", error=naming(line, file))

    def refused(self, planned: Planned, line: str) -> Record:
        """A record of what a rule does not allow."""
        return self.maker.record(planned, status="refused", error=line)
