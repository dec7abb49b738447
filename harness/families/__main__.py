"""The command `python -m harness.families [FAMILY ...]`: which model families are measured rightly, partly or not, and why."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from harness.families import page
from harness.families.tiny import families
from harness.families.trial import WRONG, Verdict, try_family
from harness.files.paths import CONF
from harness.files.pipes import end_with_reader

HOME = CONF.parent / "results" / "reference"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if a family is run and gives another result than transformers; 2 with a line on what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.families",
        allow_abbrev=False,
        description="Builds every causal language model that transformers has as a tiny one and tries it: everything kept "
        "against transformers itself, tokens evicted against tokens masked, bytes against transformers' own cache.",
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="a model_type of transformers; all of them without one")
    parser.add_argument(
        "--write", action="store_true", help=f"write families.md and families.csv to {HOME.relative_to(CONF.parent)}"
    )
    options = parser.parse_args(arguments)
    known = families()
    if unknown := [name for name in options.families if name not in known]:
        print(f"error: transformers has no causal language model of the type {', '.join(unknown)}", file=sys.stderr)
        return 2
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    verdicts = []
    for name in options.families or known:
        verdicts.append(try_family(name))
        print(f"{name}: {verdicts[-1].status}{f' ({verdicts[-1].reason})' if verdicts[-1].reason else ''}", flush=True)
    print(page.counts(verdicts))
    if options.write:
        write(HOME, verdicts)
    return int(any(one.status == WRONG for one in verdicts))


def write(folder: Path, verdicts: Sequence[Verdict]) -> None:
    """The table of these verdicts as Markdown and as CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "families.md").write_text(page.as_markdown(verdicts), encoding="utf-8")
    (folder / "families.csv").write_text(page.as_csv(verdicts), encoding="utf-8")


if __name__ == "__main__":
    if "--write" not in sys.argv:  # its files are made after the last line
        end_with_reader()
    sys.exit(main())
