"""Makes failed records of what a dead process was to make, so that its loss shows where results are read.

It loads no weights; its caller says why the process ended and what it printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.configure.arms import Arm
from harness.evaluation.assemble import assemble, results_folder
from harness.evaluation.planned import Planned, asked
from harness.records.failures import naming, trace_file
from harness.records.progress import Snapshot, state
from harness.records.shards import read
from harness.records.store import Store

WHY = "the job ended before this record was made"
TAIL = 8192  # characters of what was printed


def record_lost(config: Mapping[str, Any], found: Sequence[Arm], reason: str, printed: str, before: Snapshot) -> int:
    """Write a failed record for all that a configuration asks for and nobody made; returns how many.

    Left alone are finished records, records of any kind that came after `before`, and what another process is busy with.
    The same command tries failed records again.

    Args:
        config: the resolved configuration of the dead process.
        found: its arms.
        reason: how it ended, one line.
        printed: its last output or its traceback; the end of it goes to a file in `failures/`.
        before: what the run folder held when the process's sweep began.

    Raises:
        UserError: tokenizer, examples or limits of a calibrated codec cannot be had here, or the folder cannot be written.
    """
    bench = assemble({**config, "progress": False, "redo": False}, found, weights=False)
    store: Store[Planned] = Store(results_folder(config) / bench.setup.run_id)
    try:
        planned = bench.planned(bench.runner(store))
        made = before.new(read(store.folder).tries)
        with bench.recorder(store, [one for one in planned if one.key not in made]) as recorder:
            lost = list(next(recorder.rounds(), ()))
            if not lost:
                return 0
            line = f"{WHY}: {reason}"
            if printed.strip():
                file = trace_file(lost[0].key)
                store.write(file, lambda path: path.write_text(printed[-TAIL:], encoding="utf-8"))
                line = naming(line, file)
            recorder.write([recorder.failed(one, line, "") for one in lost])
        if not {arm.name for arm in found} <= {arm.name for arm in state(store.folder).arms}:
            store.write_manifest(
                bench.manifest(found) | {"config": dict(config), "asked": asked(planned)}
            )  # the dead one did not come to it
        return len(lost)
    finally:
        store.close()
