"""What every label of the tables and pages means, and whether its number may be trusted; results/README.md shows the same.

Labels are keyed as the points table holds them, in the order a reader meets them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.analysis.points import Row


class Entry(NamedTuple):
    """One label: how it is printed, what it says, and whether the number beside it may be trusted."""

    printed: str
    meaning: str
    trust: str

    @property
    def text(self) -> str:
        return f"{self.printed}: {self.meaning}. Trust it? {self.trust}."


VERDICTS: dict[str, Entry] = {
    "base": Entry("base", "the full cache, which all others are compared with", "Yes"),
    "equal within noise": Entry(
        "= full",
        "equal within noise: the paired interval holds 0 and reaches at most 0.15 to either side (of perplexities: in nats)",
        "Yes, within that interval",
    ),
    "above": Entry("above", "better than the full cache: the whole paired interval is", "Yes; one such point in 40 is chance"),
    "below": Entry("below", "worse than the full cache: the whole paired interval is", "Yes; one such point in 40 is chance"),
    "clearly below": Entry("clearly below", "worse than the full cache: not even the two intervals meet", "Yes"),
    "not resolved": Entry(
        "not resolved",
        "the paired interval holds 0 but is too wide to call equal",
        "The interval yes; for a verdict run more examples",
    ),
    "too few documents for a verdict": Entry(
        "too few docs",
        "too few documents for a verdict: examples of so few may agree by chance",
        "No; run more documents",
    ),
    "": Entry("–", "no comparison: the reason is below the table", "The score yes, a difference no"),
}
COUNTS: dict[str, Entry] = {
    "n_failed": Entry("failed", "ended by an error, see failures/", "Only if 0: the score leaves these examples out"),
    "n_refused": Entry("refused", "not possible with this setting, the reason says what would be", "Only if 0: as failed"),
    "n_truncated": Entry("truncated", "the prompt was cut to what the model takes", "Only if 0: the score leaves them out"),
    "n_unscored": Entry("without a score", "answered, but the task gave no number", "Only if 0: the score leaves them out"),
    "n_empty": Entry(
        "empty answers",
        "the model gave no text, which is scored as it is",
        "Look at the records: a task or stop text may be the cause",
    ),
    "n_not_exercised": Entry(
        "not compressed",
        "nothing was evicted or stored inexactly (record status not_exercised)",
        "It says nothing about the stack",
    ),
    "n_without_bytes": Entry(
        "without bytes",
        "the bytes of these examples are missing or not above zero",
        "No: the point is listed and left off the front",
    ),
    "n_superseded": Entry("replaced by a later record", "made again; only the latest counts", "Yes"),
}
FLAGS: dict[str, Entry] = {
    "frontier": Entry(
        "● front", "no other point of this table does better for as few bytes", "The place, not a difference between two points"
    ),
    "chance of it": Entry(
        "chance of it",
        "how often the point is on the frontier when the documents are drawn again with replacement",
        "Yes, for documents like these",
    ),
    "could see": Entry(
        "could see",
        "the smallest loss against the full cache that this sample could have shown",
        "Yes; a smaller loss may be there unseen",
    ),
    "holm": Entry(
        "‡",
        "the verdict does not hold once all points of its run and mode are looked at (Holm at 0.05)",
        "Only for a point that was named beforehand",
    ),
    "simulated": Entry(
        "* simulated storage",
        "values are rounded as the codec would, but not stored packed",
        "The score yes; the bytes are computed, not measured",
    ),
    "reach": Entry(
        "within reach",
        "the share of the full cache's bytes that stacks act on; recurrent states and windows are the same in every arm",
        "Yes; no ratio of this model can fall below the rest",
    ),
    "not discriminative": Entry(
        "not discriminative", "the full cache itself scores at chance", "No: equal scores say nothing about the stacks"
    ),
    "chance cell": Entry(
        "†", "the full cache scores at chance at this length and depth", "No: the cell says nothing about the stack"
    ),
    "no comparison": Entry(
        "no comparison",
        "the full cache lacks a score for some of these examples, or there is none",
        "The score yes, a difference no",
    ),
    "not ranked": Entry(
        "not ranked",
        "no place on the frontier: no score, other examples than the rest, or nothing compressed",
        "Not beside other points",
    ),
}
WARNINGS: dict[str, Entry] = {
    "layer budget": Entry(
        "layer budget", "the layers got another budget than the one asked for", "Yes, for the budget that is named"
    ),
    "few compressed reads": Entry(
        "few compressed reads",
        "most scored tokens of the stream read a cache that was still exact",
        "No: make the stream longer or the chunks smaller",
    ),
    "empty answers": Entry(
        "empty answers",
        "a fifth or more of the answers hold no text",
        "Look at the records: a task or stop text may be the cause",
    ),
    "truncated prompts": Entry("truncated prompts", "prompts were cut to what the model takes", "Of the prompts that are left"),
}
DIFFERS = ("above", "below", "clearly below")
HOLM = 0.05
SECTIONS = {"Verdict": VERDICTS, "Count": COUNTS, "Flag": FLAGS, "Warning": WARNINGS}


def verdict_text(verdict: str) -> str:
    """A verdict as tables print it; one that is not known here is printed as it is."""
    return VERDICTS[verdict].printed if verdict in VERDICTS else verdict


def judged(row: Row) -> str:
    """The verdict of a point as tables print it, marked where it does not hold among all points of its run and mode."""
    text = verdict_text(row["vs_full"])
    return f"{text} {FLAGS['holm'].printed}" if unheld(row) else text


def unheld(row: Row) -> bool:
    """Whether the point's verdict says that it differs, and Holm's adjustment does not; False where that is not known."""
    return row["vs_full"] in DIFFERS and row.get("holm_p", 0.0) > HOLM


def tip(verdict: str) -> str:
    """What a verdict means and whether to trust it; empty where it is not known."""
    return VERDICTS[verdict].text if verdict in VERDICTS else ""


def entries() -> Iterable[tuple[str, Entry]]:
    """(section, entry) of every label."""
    return ((section, entry) for section, table in SECTIONS.items() for entry in table.values())


def markdown() -> str:
    """The glossary as results/README.md shows it."""
    rows = (f"| {entry.printed} | {entry.meaning} | {entry.trust} |" for _, entry in entries())
    return "\n".join(["| label | meaning | may I trust the number? |", "|---|---|---|", *rows])
