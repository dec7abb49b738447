"""What a run says of its prompts before it begins, a line each on stderr. It knows no record and no stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.evaluation.recorder import Planned
from harness.models.tokenizer import Tokenizer
from harness.types import Example, Task

LEAST_THINKING = 1024  # tokens of an answer below which thinking seldom comes to its end


def notices(task: Task, tokens: Tokenizer, works: Sequence[Planned]) -> list[str]:
    """Lines on what makes scores of these works mean something else than they seem to; empty where nothing does."""
    examples: dict[str, Example] = {f"{work.seed} {work.example.id}": work.example for work in works}
    own: Any = getattr(task, "notices", None)  # a task may bring words of its own
    return [*_thinking(task, tokens, works), *(own(list(examples.values())) if own else ())]


def _thinking(task: Task, tokens: Tokenizer, works: Sequence[Planned]) -> list[str]:
    if not task.chat or tokens.thinking is None:
        return []
    room = _room(works)
    if not 0 < room < LEAST_THINKING:
        return []
    return [
        f"the chat template opens a thinking block ({tokens.thinking}) that the answer of {room} tokens has to end before it "
        f"says anything: allow {LEAST_THINKING} tokens or more, close the block (task.answer_prefix, where the task has it), "
        "or set task.chat=false"
    ]


def _room(works: Sequence[Planned]) -> int:
    """Tokens of the longest answer; 0 where nothing is generated."""
    asked = [request.max_new for work in works for request in getattr(work, "requests", ())]  # lm-eval's
    return max(asked or [0 if work.example.choices else work.example.max_new_tokens for work in works], default=0)
