"""The command `python -m harness.recommend RUN...`: which setting to ship, from the records of runs. It only reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.advice.evidence import evidence
from harness.advice.recommendation import Wish, advice
from harness.engine.batches import parse_bytes
from harness.errors import UserError, require
from harness.files.pipes import end_with_reader
from harness.files.plain_files import printable
from harness.records.progress import run_folders


def wish_of(options: argparse.Namespace) -> Wish:
    """The checked options. UserError names the one that is wrong."""
    asked = options.budget is not None or options.max_loss is not None
    require(asked, "--budget", None, "one of --budget SIZE and --max-loss SHARE, or both, is what is recommended by")
    for name in ("max_loss", "confidence"):
        share = getattr(options, name)
        require(share is None or 0 < share < 1, f"--{name.replace('_', '-')}", share, "a share, above 0 and below 1")
    for name in ("seq", "batch"):
        number = getattr(options, name)
        require(number is None or number > 0, f"--{name}", number, "a positive whole number")
    return Wish(
        max_loss=options.max_loss,
        confidence=options.confidence,
        budget=None if options.budget is None else parse_bytes("--budget", options.budget),
        seq=options.seq,
        batch=options.batch,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.recommend", description="Which setting to ship, from records.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of them")
    parser.add_argument("--budget", metavar="SIZE", help="memory of all caches together, such as 2GiB")
    parser.add_argument(
        "--seq", type=int, metavar="N", help="tokens of a sequence that the bytes are for (default: as measured)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (1)")
    parser.add_argument("--max-loss", type=float, metavar="SHARE", help="most units that may lose an answer, such as 0.02")
    parser.add_argument("--confidence", type=float, default=0.95, metavar="SHARE", help="of that guarantee (0.95)")
    options = parser.parse_args(arguments)
    try:
        wish = wish_of(options)
        folders = [folder for given in options.runs for folder in run_folders(given)]
        for line in advice(evidence(folders), wish):
            print(printable(line))
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
