"""What a run says of its prompts before it begins, a line each on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from harness.evaluation.planned import Planned
from harness.models.tokenizer import Tokenizer
from harness.types import Example, Task

LEAST_THINKING = 1024  # tokens of an answer below which thinking seldom comes to its end


@runtime_checkable
class Noticing(Protocol):
    """A task that has warnings of its own about its examples."""

    def notices(self, examples: Sequence[Example]) -> Sequence[str]: ...


def notices(task: Task, tokens: Tokenizer, planned: Sequence[Planned]) -> list[str]:
    """Lines on what makes scores of these records mean something else than they seem to; empty where nothing does."""
    examples: dict[str, Example] = {f"{one.seed} {one.example.id}": one.example for one in planned}
    own = task.notices(list(examples.values())) if isinstance(task, Noticing) else ()
    return [*_thinking(task, tokens, planned), *own]


def _thinking(task: Task, tokens: Tokenizer, planned: Sequence[Planned]) -> list[str]:
    if not task.chat or tokens.thinking is None:
        return []
    room = max((one.answer_room for one in planned), default=0)
    if not 0 < room < LEAST_THINKING:
        return []
    return [
        f"the chat template opens a thinking block ({tokens.thinking}) that the answer of {room} tokens has to end before it "
        f"says anything: allow {LEAST_THINKING} tokens or more, close the block (task.answer_prefix, where the task has it), "
        "or set task.chat=false"
    ]
