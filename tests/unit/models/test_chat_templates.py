"""Chat templates that cannot be used are one line, whoever renders them; one that opens a thinking block is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.evaluation.notices import notices
from harness.models.random_model import byte_tokenizer
from harness.models.tokenizer import Tokenizer
from harness.types import Example
from tasks.lm_eval_task import LmEval
from tests.support import lm_eval_tasks

SHOWN = "<|u|>{{ messages[0]['content'] }}<|a|>"
BAD: dict[str, tuple[Any, str]] = {
    "raises": ("{{ raise_exception('only for tools') }}", "the model's chat template fails: only for tools"),
    "unknown function": ("{{ strange() }}", "the model's chat template fails: 'strange' is undefined"),
    "wrong type": ("{{ messages + 1 }}", "the model's chat template fails: "),
    "syntax": ("{% if %}", "the model's chat template fails: "),
    "named": ({"rag": SHOWN, "tool_use": SHOWN}, "the model's chat templates are rag, tool_use, and none is the default"),
    "none": (None, "the model's tokenizer has no chat template"),
}


def tokens(template: Any) -> Tokenizer:
    hf = byte_tokenizer(512)
    hf.chat_template = template
    return Tokenizer(hf, 512)


@pytest.mark.parametrize("kind", BAD)
def test_a_template_that_cannot_be_used_is_one_line(kind: str, tmp_path: Path) -> None:
    """The kind: a program that comes with a model and fails; our tasks and lm-eval's render through one place."""
    template, line = BAD[kind]
    with pytest.raises(UserError) as ours:
        tokens(template).prompt("c", "q", "", chat=True)
    with pytest.raises(UserError) as theirs:
        lm_eval = LmEval(name=lm_eval_tasks.ANSWER, include_path=str(lm_eval_tasks.write(tmp_path, 2)), chat=True)
        lm_eval.examples(tokens(template), None, 0)
    for found in (ours, theirs):
        text = str(found.value)
        assert text.startswith(f"task.chat=True is not possible: {line}") and text.endswith("(task.chat=false)")
        assert "\n" not in text


def test_named_templates_with_a_default_are_used() -> None:
    assert tokens({"default": SHOWN, "tool_use": "x"}).prompt("c", "q", "", chat=True).ids


@dataclass(frozen=True)
class Asks:
    """What notices read of a planned record."""

    example: Example
    seed: int = 0

    @property
    def answer_room(self) -> int:
        return self.example.max_new_tokens


@dataclass(frozen=True)
class Chat:
    chat: bool = True


def said(template: str, room: int, *, chat: bool = True) -> list[str]:
    example = Example(id="1", context="c", question="q", answer_prefix="", answers=("a",), max_new_tokens=room)
    task: Any = Chat(chat)
    works: Any = [Asks(example)] * 3
    return notices(task, tokens(template), works)


@pytest.mark.parametrize("tag", ["<think>", "<think>\n", "[THINK]", "<|begin_of_thought|>", "<reasoning>"])
def test_a_thinking_block_left_open_is_named_once(tag: str) -> None:
    """32 tokens of answer that all go into a thinking block: nothing was said of it."""
    (line,) = said(SHOWN + tag, 32)
    assert tag.strip() in line and "32 tokens" in line and "task.chat=false" in line
    assert said(SHOWN + tag, 4096) == []
    assert said(SHOWN + tag, 32, chat=False) == []


@pytest.mark.parametrize("tail", ["", "<think>\n\n</think>\n\n", "[THINK][/THINK]", "<|begin_of_thought|><|end_of_thought|>"])
def test_a_block_that_is_closed_is_no_matter(tail: str) -> None:
    assert said(SHOWN + tail, 32) == []


def test_a_switch_is_used_where_the_template_has_one() -> None:
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
    assert said(SHOWN + switch, 32) == []
