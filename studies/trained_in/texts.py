"""What the models read: keys bound to digits, then questions about them, and prose; as bytes, a BOS in front.

A binding is written "k7k" and a question " k7". In training every digit of a question is to be predicted, and the second key of
every binding; in the evaluation 16 keys are bound, and one is asked for.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import torch

from harness.configure.from_python import composed
from harness.configure.typed import build
from harness.types import Corpus

BOS = 256
FEWEST, KEYS = 2, 16  # keys of a text
TRIPLES = 24  # bindings and questions of a training text
LENGTH = 1 + 3 * TRIPLES  # its ids
QUESTIONS = 200  # of the evaluation
HELD_OUT = 8  # last books of the corpus, which no model is trained on
IGNORED = -100


def recall_batch(draw: random.Random, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, digits, echoes), all [rows, LENGTH]: the digits of questions, and the second keys of bindings, all else ignored."""
    ids = torch.full((rows, LENGTH), BOS)
    digits, echoes = torch.full((rows, LENGTH), IGNORED), torch.full((rows, LENGTH), IGNORED)
    for row in range(rows):
        bound = _bindings(draw, draw.randint(FEWEST, KEYS))
        asked = [draw.choice(list(bound)) for _ in range(TRIPLES - len(bound))]
        ids[row, 1:] = torch.tensor(list((_written(bound) + "".join(f" {key}{bound[key]}" for key in asked)).encode()))
        ends, first = torch.arange(3, LENGTH, 3), len(bound)
        echoes[row, ends[:first]], digits[row, ends[first:]] = ids[row, ends[:first]], ids[row, ends[first:]]
    return ids, digits, echoes


def prose_batch(draw: random.Random, rows: int, prose: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [rows, LENGTH], targets): seeded pieces of prose, every byte of which is to be predicted."""
    starts = [draw.randrange(len(prose) - LENGTH) for _ in range(rows)]
    ids = torch.tensor([[BOS, *prose[at : at + LENGTH - 1]] for at in starts])
    targets = ids.clone()
    targets[:, 0] = IGNORED
    return ids, targets


def corpus() -> tuple[bytes, str]:
    """Prose for training, and the text of the held-out books."""
    books: Corpus = build(composed([]).corpus, "corpus")
    documents = list(books.documents())
    return "\n".join(documents[:-HELD_OUT]).encode(), "\n".join(documents[-HELD_OUT:])


def write_questions(path: Path) -> None:
    """The evaluation's questions for `task=jsonl`; always the same ones."""
    draw = random.Random("recall, evaluation")
    lines = []
    for number in range(QUESTIONS):
        bound = _bindings(draw, KEYS)
        key = draw.choice(list(bound))
        asked = {"context": _written(bound), "question": f" {key}", "answers": [bound[key]]}
        lines.append(json.dumps({"id": f"recall-{number}", **asked}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _bindings(draw: random.Random, keys: int) -> dict[str, str]:
    """Distinct letters, each with a digit of its own draw."""
    return {key: draw.choice(string.digits) for key in draw.sample(string.ascii_lowercase, keys)}


def _written(bound: dict[str, str]) -> str:
    return "".join(f"{key}{digit}{key}" for key, digit in bound.items())
