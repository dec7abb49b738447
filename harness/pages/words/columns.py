"""What every column of a page's tables holds, and the words of its figures and details that are not everybody's.

Columns are keyed by their heads; a head may say after a comma or in brackets of which moment it is.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One label: how it is printed, what it says, and whether the number beside it may be trusted."""

    printed: str
    meaning: str
    trust: str

    @property
    def text(self) -> str:
        return f"{self.printed}: {self.meaning}. Trust it? {self.trust}."


ABOVE = "▲"  # after a number of bytes that is above the full cache's
_SURE, _MEASURED = "Yes, within its interval", "Yes, it is measured"
COLUMNS: dict[str, Entry] = {
    entry.printed: entry
    for entry in (
        Entry("stack and point", "what is done to the cache, and the number that is varied: 0.25 keeps a quarter", "Yes"),
        Entry("n", "examples that were scored", "Yes"),
        Entry("score", "the metric in the table's title, over all examples", _SURE),
        Entry("95 %", "the interval of the score by itself: to compare two points it is too wide", "Yes, of one point"),
        Entry(
            "vs full",
            "score minus that of the full cache on the same examples; of streams nats a token, of which more is worse",
            "Yes, within its paired interval",
        ),
        Entry(
            "95 % paired", "the interval of that difference; what is beyond its end is ruled out", "Yes, for this point alone"
        ),
        Entry("verdict", "what interval and difference amount to; each is explained above", "See there"),
        Entry("Holm p", "p of the difference, adjusted for all points of the run and mode", "Yes"),
        Entry(
            "could prove",
            "the smallest loss that so many documents would have shown as worse; not what is excluded, which is "
            "where the paired interval ends",
            "Yes; a smaller loss may be there unproven",
        ),
        Entry(
            "settled by",
            "about how many documents an open verdict takes, if more of them do as these did",
            "As a plan; a guarantee takes more: harness.recommend says how many",
        ),
        Entry(
            "KV bytes", "allocated bytes of one sample once its context was compressed (streams: the mean over time)", _MEASURED
        ),
        Entry("of full", "these bytes over the full cache's at the same moment", _MEASURED),
        Entry("kept", "tokens that are stored over tokens read, mean over layers and heads (streams: at the end)", _MEASURED),
        Entry("KL to full", "how far the next-token distribution is from the full cache's, nats a token", _MEASURED),
        Entry("top-1 agreement", "how often the most probable next token is the full cache's", _MEASURED),
        Entry(
            "attention error",
            "how far attention outputs are from those on exact keys and values, relative, mean of all layers",
            _MEASURED,
        ),
        Entry("nats / byte", "log-loss a byte of text: comparable between tokenizers, as perplexity is not", _MEASURED),
        Entry("logical", "bytes that the content needs, without what storages round up to", "Yes, computed from shapes"),
        Entry("storage", "packed: really stored so; simulated: rounded as if, bytes computed", "See * simulated storage"),
        Entry("end of answer", "bytes when the answer is complete: its tokens are stored too", _MEASURED),
        Entry("at the end", "bytes at the end of the stream", _MEASURED),
        Entry("peak while answering", "the most bytes after the context was compressed, the largest of all samples", _MEASURED),
        Entry(
            "peak incl. prefill",
            f"the most bytes at any time, the exact context beside its compressed copy included; {ABOVE}: more than the full "
            "cache ever holds, so where that just fits this does not",
            "Yes, for compressing after an exact prefill",
        ),
        Entry(
            "bits / value",
            "allocated bits for each key or value number that is kept, scales and exact tails included",
            _MEASURED,
        ),
        Entry("frontier", "● no other point does better for as few bytes", "The place, not a difference between two points"),
        Entry(
            "chance of it",
            "how often the point is on the frontier when the documents are drawn again with replacement",
            "Yes, for documents like these",
        ),
        Entry("notes", "what a reader of this point has to know", "It is about trust"),
    )
}
WORDS: dict[str, Entry] = {
    entry.printed: entry
    for entry in (
        Entry("contains", "share of outputs in which the right answer stands, capitals and marks aside", _SURE),
        Entry("perplexity", "exp of the mean log-loss of a token, over all documents", _SURE),
        Entry(
            "hypervolume",
            "area under the frontier: log2 of the saving times the share of the score above chance that is kept; not shown "
            "of streams, whose chance is so far off that it would count bytes alone",
            "To compare runs of one task; it knows no interval",
        ),
        Entry("chance", "the score of a guess; of streams the perplexity of drawing any token", "Yes"),
        Entry(
            "phase",
            "when tokens are evicted: once after the context (prefill), while it is read (chunked), at every step (always)",
            "Yes",
        ),
        Entry("payload", "the numbers of keys and values, exact or as codes", _MEASURED),
        Entry("metadata", "scales and zero points of codes, codebooks and bases", _MEASURED),
        Entry("tail", "tokens that wait exact until a group of them is full, or stay exact", _MEASURED),
        Entry("positions", "where in the text each kept token was: a full cache needs none", _MEASURED),
        Entry("state", "what a scorer carries along, such as attention sums", _MEASURED),
        Entry("recurrent", "states of a hybrid model's other layers, the same in every arm", _MEASURED),
        Entry("padding", "rounding up of storages", _MEASURED),
        Entry("scratch", "a decoded copy that a stack keeps", _MEASURED),
        Entry(
            "question seen",
            "query-aware: the question is there while the cache is compressed; query-agnostic: it comes later",
            "Two benchmarks, not two results",
        ),
        Entry(
            "answers in other words",
            "share of answers that are not the full cache's, word for word; most are as right",
            "Yes; it is no loss",
        ),
        Entry("nats", "natural logarithms: a loss of 0.01 nats a token is 1 % of perplexity", "Yes"),
    )
}


def tip(head: str) -> str:
    """What the column of this head holds and whether to trust it; empty where that is not known."""
    plain = head.split(" (")[0]
    entry = COLUMNS.get(plain) or COLUMNS.get(plain.split(", ")[0])
    return entry.text if entry else ""
