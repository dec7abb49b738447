"""Runs one job of a sweep so that nothing it does can end the sweep, and writes how it went."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from harness.engine.batches import one_line
from harness.errors import UserError
from harness.sweep import outcome
from harness.sweep.outcome import Outcome, Refused
from harness.sweep.supervise import TRACE


def folder() -> Path | None:
    """The folder of the job that this process runs; None where it is no part of a sweep."""
    named = os.environ.pop(outcome.VARIABLE, None)  # the job's own children are no jobs
    if named:
        return Path(named)
    hydra = HydraConfig.get()
    return Path(hydra.runtime.output_dir) if hydra.mode == RunMode.MULTIRUN else None


def run(place: Path, work: Callable[[], tuple[Path, int]]) -> Outcome:
    """Do the job's work and write its outcome; only the user's own interrupt leaves this function as an exception.

    Args:
        place: the job's folder.
        work: returns (run folder, number of failed records).
    """
    outcome.start(place)
    begin = time.monotonic()
    status, reason = "ok", ""
    try:
        where, failed = work()
        if failed:
            status, reason = (
                "failed",
                f"{failed} records {'were refused' if isinstance(failed, Refused) else 'failed'}, see {where}",
            )
    except UserError as error:
        status, reason = "failed", str(error)
    except (Exception, SystemExit) as error:  # a method's sys.exit() must not end the jobs that come after it
        trace = place / TRACE
        trace.write_text(traceback.format_exc(), encoding="utf-8")
        said = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else one_line(error)
        status, reason = "crashed", f"{said} ({trace})"
    if reason:
        print(f"error: {reason}", file=sys.stderr)
    ended = Outcome(status=status, reason=reason, seconds=round(time.monotonic() - begin, 3))
    outcome.end(place, ended)
    return ended
