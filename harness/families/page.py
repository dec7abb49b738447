"""The table of families as Markdown and as CSV, and as numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields

import torch
import transformers

from harness.families.trial import HONOURED, NOT_BUILT, PARTLY, REFUSED, WRONG, Verdict

MEANING = {
    HONOURED: "equal to transformers with everything kept, to masked tokens with tokens evicted, and byte for byte",
    PARTLY: "the same, but stacks change nothing of it, or less than its whole cache",
    REFUSED: "not run, for the reason given",
    NOT_BUILT: "transformers itself does not build or run a tiny one alone",
    WRONG: "run, and another result than transformers': a fault of this project",
}
COMMAND = "python -m harness.families --write"


def counts(verdicts: Sequence[Verdict]) -> str:
    """All in one line."""
    found = (f"{sum(one.status == status for one in verdicts)} {status}" for status in MEANING)
    return f"{len(verdicts)} families: {', '.join(found)}"


def as_csv(verdicts: Sequence[Verdict]) -> str:
    """A line a family."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Verdict)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(one) for one in verdicts)
    return text.getvalue()


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """A page for people: what the words mean, then a table for each of them."""
    lines = [
        "# Model families",
        "",
        f"Every `model_type` of transformers {transformers.__version__} that has a causal language model: built tiny with",
        f"random weights, in fp32 on a CPU (torch {torch.__version__}), and tried. Made by `{COMMAND}`; `families.csv` has the",
        "same, a line a family.",
        "",
        f"{counts(verdicts)}.",
    ]
    for status, meaning in MEANING.items():
        of = [one for one in verdicts if one.status == status]
        if of:
            lines += ["", f"## {status} ({len(of)})", "", f"{meaning[0].upper()}{meaning[1:]}.", "", *_table(status, of)]
    return "\n".join(lines) + "\n"


def _table(status: str, verdicts: Sequence[Verdict]) -> list[str]:
    if status not in (HONOURED, PARTLY):
        return ["| family | reason |", "|---|---|", *(f"| `{one.family}` | {_cell(one.reason)} |" for one in verdicts)]
    head = ["| family | layers that stacks compress | from transformers | `positions=cache` | note |", "|---|---|---|---|---|"]
    return [*head, *(_row(one) for one in verdicts)]


def _row(one: Verdict) -> str:
    equal = "every bit equal" if one.difference == 0 else f"{one.difference:.0e} of the largest logit"
    return f"| `{one.family}` | {one.layers} | {equal} | {'yes' if one.positions_cache else 'no'} | {_cell(one.reason)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
