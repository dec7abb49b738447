"""The command `python -m harness.status DIR`: how far a run, or every run of a folder, is. It only reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.errors import UserError
from harness.files.pipes import end_with_reader
from harness.files.plain_files import printable
from harness.records.progress import RunState, run_folders, state

WIDTH = 120


def line(run: RunState) -> str:
    """One run in one line: counts, writers, pace, time left."""
    counts = [f"{run.total(name)} {name}" for name in ("ok", "refused", "failed", "missing")]
    words = [f"{run.folder}: {', '.join(counts)}"]
    words += [f"{run.redo_failed} could not be made again: the older records count"] if run.redo_failed else []
    words += [f"{run.writers} writer{'s' if run.writers != 1 else ''} at work" if run.writers else "nobody at work"]
    if run.examples_per_s is not None and run.records_per_s is not None:
        words.append(f"{run.examples_per_s:.2g} examples/s, {run.records_per_s:.2g} records/s")
    if run.writers and run.total("missing") and run.seconds_left is not None:
        words.append(f"{timedelta(seconds=round(run.seconds_left))} left")
    return printable("; ".join(words))


def table(run: RunState) -> Table:
    """The arms of a run."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("arm", "ok", "refused", "failed", "missing"):
        found.add_column(name, justify="left" if name == "arm" else "right", overflow="fold")
    for arm in run.arms:
        found.add_row(Text(printable(arm.name)), *(str(n) for n in (arm.ok, arm.refused, arm.failed, arm.missing)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.status", description="How far runs are; reads only.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run folder, a folder of runs such as results, or a sweep's")
    options = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH, color_system=None)
    try:
        for folder in run_folders(options.folder):
            if not folder.is_dir():  # only a sweep's summary can name such
                print(printable(f"{folder}: there is no such folder"))
                continue
            run = state(folder)
            console.print(printable(line(run)), markup=False, highlight=False, soft_wrap=True)
            console.print(table(run))
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
