"""What every label of the tables and pages means, and whether its number may be trusted; results/README.md shows the same.

Labels are keyed as the points table holds them, in the order a reader meets them.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.analysis.intervals import EQUAL, OPEN, TOO_FEW
from harness.analysis.points import Row
from harness.pages.words.columns import ABOVE, COLUMNS, WORDS, Entry
from harness.pages.words.verdicts import BOUND, MAYBE, Compared, compared

VERDICTS: dict[str, Entry] = {
    "base": Entry("base", "the full cache, which all others are compared with", "Yes"),
    EQUAL: Entry(
        f"equal within ±{BOUND}",
        f"equal within noise: the paired interval holds 0 and reaches at most {BOUND} to either side (of streams in nats); "
        "half of its width is at most 0.15, of streams 0.05 nats",
        f"Yes, as far as {BOUND}: the smaller it is, the more is said",
    ),
    "above": Entry("better", "better than the full cache: the whole paired interval is", "Yes; one such point in 40 is chance"),
    "below": Entry("worse", "worse than the full cache: the whole paired interval is", "Yes; one such point in 40 is chance"),
    "clearly below": Entry("clearly worse", "worse than the full cache: not even the two intervals meet", "Yes"),
    OPEN: Entry(
        f"no loss seen (≤ {BOUND})",
        f"no worse than the full cache on these examples, too few to call it equal: a loss of up to {BOUND} is possible",
        f"Not yet: as far as {BOUND}; the column settled by says how many documents would tell",
    ),
    MAYBE: Entry(
        f"maybe worse (≤ {BOUND})",
        f"worse on these examples, which may be chance as the paired interval holds 0: a loss of up to {BOUND} is possible",
        f"Not yet: as far as {BOUND}; the column settled by says how many documents would tell",
    ),
    TOO_FEW: Entry(
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
    "peak": Entry(
        f"{ABOVE} peak",
        "at some time it holds more than the full cache ever does: the context is read exactly, then compressed, so for a "
        "moment the exact rows, their statistics and the compressed copy are there together (phase chunked keeps that small)",
        "Yes, for this way of compressing; where the full cache just fits, this point does not",
    ),
    "tail": Entry(
        "exact tail",
        "more than a quarter of the bytes are tokens that wait or stay exact beside the codes (KIVI's residual, the newest)",
        "The bytes yes; on longer prompts their share falls, and the whole is smaller than here",
    ),
    "kept": Entry(
        "kept",
        "the share of tokens that are left is another than the number in the name: a fraction is one of the context, and what "
        "comes after it stays (phase prefill) or pushes out others (always)",
        "Yes; compare by bytes, not by name",
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
SECTIONS = {"Verdict": VERDICTS, "Count": COUNTS, "Flag": FLAGS, "Warning": WARNINGS, "Column": COLUMNS, "Word": WORDS}


def verdict_text(told: Compared) -> str:
    """A verdict in words, with its number; one that is not known here is printed as it is."""
    return VERDICTS[told.key].printed.replace(BOUND, told.bound) if told.key in VERDICTS else told.verdict


def judged(row: Row) -> str:
    """The verdict of a point as tables print it, marked where it does not hold among all points of its run and mode."""
    text = verdict_text(compared(row))
    return f"{text} {FLAGS['holm'].printed}" if unheld(row) else text


def unheld(row: Row) -> bool:
    """Whether the point's verdict says that it differs, and Holm's adjustment does not; False where that is not known."""
    return row["vs_full"] in DIFFERS and row.get("holm_p", 0.0) > HOLM


def entries() -> Iterable[tuple[str, Entry]]:
    """(section, entry) of every label."""
    return ((section, entry) for section, table in SECTIONS.items() for entry in table.values())


def markdown() -> str:
    """The glossary as results/README.md shows it."""
    rows = (f"| {entry.printed} | {entry.meaning} | {entry.trust} |" for _, entry in entries())
    return "\n".join(["| label | meaning | may I trust the number? |", "|---|---|---|", *rows])
