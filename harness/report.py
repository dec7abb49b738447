"""The command `python -m harness.report RUN... --out F`: one table and one page from several run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.files.pipes import end_with_reader
from harness.files.plain_files import printable
from harness.pages.outputs import merge


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.report", description="Merge runs into one table and page.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders such as results/<run_id>, folders of them, or a sweep's"
    )
    parser.add_argument("--out", type=Path, default=Path("dashboard.html"), metavar="F", help="page to write")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="LABEL",
        help="also compare all points with this one, paired (repeatable)",
    )
    options = parser.parse_args(arguments)
    try:
        merge(options.runs, options.out, options.against)
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
