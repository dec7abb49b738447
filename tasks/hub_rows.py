"""Rows of question data sets: a file in the SQuAD format, and values inside nested columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.files.plain_files import read_text
from tasks.checks import require_valid


def squad_rows(path: str) -> list[dict[str, Any]]:
    """Rows of a SQuAD file: id, title, context, question and answers {"text": [...]}.

    Raises:
        UserError: no such file, or another format; names the file and the place in it.
    """
    try:
        found = json.loads(read_text(Path(path).expanduser(), "utf-8-sig", follow=True))
    except OSError as error:
        raise UserError(f"task.path={path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"task.path={path!r} is not UTF-8 text: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"task.path={path!r} is not JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise UserError(f"task.path={path!r} is not JSON: nested too deep") from None
    return list(_flat(found, f"task.path={path!r}"))


def picked(row: Mapping[str, Any], column: str | None, where: str) -> Any:
    """The value of a column; a dot leads into a dictionary, or into every dictionary of a list.

    Raises:
        UserError: there is no such column; names those there are.
    """
    value: Any = row
    for part in str(column).split("."):
        holders = value if isinstance(value, list) else [value]
        if not all(isinstance(holder, Mapping) and part in holder for holder in holders):
            raise UserError(f"{where} has no column {column!r}; it has {', '.join(map(str, row))}")
        value = [holder[part] for holder in holders] if isinstance(value, list) else value[part]
    return value


def texts(value: Any, where: str) -> list[str]:
    """A text or a list as texts; the items of an inner list are joined.

    Raises:
        UserError: any other value.
    """
    items = value if isinstance(value, list) else [value]
    joined = ["".join(map(str, item)) if isinstance(item, list) else item for item in items]
    require_valid(joined, where)
    if not all(isinstance(item, str) for item in joined):
        raise UserError(f"{where}: {value!r:.80} is not a text or a list of texts")
    return [item.removeprefix("\ufeff") for item in joined]


def _flat(found: Any, where: str) -> Iterator[dict[str, Any]]:
    for i, article in enumerate(_items(found, "data", where)):
        at = f"{where}, data[{i}]"
        for k, paragraph in enumerate(_items(article, "paragraphs", at)):
            inner = f"{at}.paragraphs[{k}]"
            for question in _items(paragraph, "qas", inner):
                answers = [_text(answer, "text", inner) for answer in _items(question, "answers", inner)]
                yield {
                    "id": _text(question, "id", inner),
                    "title": str(article.get("title", "")),
                    "context": _text(paragraph, "context", inner),
                    "question": _text(question, "question", inner),
                    "answers": {"text": answers},
                }


def _items(holder: Any, key: str, where: str) -> list[Any]:
    if not (isinstance(holder, dict) and isinstance(holder.get(key), list)):
        raise UserError(f"{where} is not in the SQuAD format: no list {key!r}")
    items: list[Any] = holder[key]
    return items


def _text(holder: Any, key: str, where: str) -> str:
    if not (isinstance(holder, dict) and isinstance(holder.get(key), str)):
        raise UserError(f"{where} is not in the SQuAD format: no text {key!r}")
    text: str = holder[key]
    require_valid(text, f"{where}: {key}")
    return text
