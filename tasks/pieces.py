"""The white space between the pieces of a prompt."""

from __future__ import annotations


def set_apart(question: str, answer_prefix: str, *, chat: bool) -> tuple[str, str]:
    """Question and answer prefix with the white space that goes before them.

    The question starts a new paragraph and, without a chat template, the answer prefix a new line; white space at
    the start of a text is kept.
    """
    question = _after("\n\n", question)
    return question, answer_prefix if chat else _after("\n", answer_prefix)


def _after(gap: str, text: str) -> str:
    return gap + text if text and not text[0].isspace() else text
