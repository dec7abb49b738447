"""The command that makes one point of a run again, from what its manifest says of how the run and its stacks were asked for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.points import Row
from harness.pages.markup import one_line

_ALONE = ("stacks", "redo", "progress")  # overrides of a run that a command for one of its points does not repeat
_SWEEP = ("-m", "--multirun")
_POINTS = "compress.points="
_OPEN, _CLOSED = "[{(", "]})"


def command(row: Row, manifest: Mapping[str, Any]) -> tuple[str, str, str]:
    """What the run was asked, the stack, the point: together a command that makes this point alone, in its mode.

    Without a manifest the run's part is the model, task and mode. A stack that was changed where it was named is spelled as the
    manifest has it; one that the manifest does not spell is named by nothing but its run, and the last two parts are empty.
    """
    point = json.loads(row["point"])
    name = str(row["stack"]) + "".join(f" {key}={value}" for key, value in point.items())
    base = _shell(["python", "-m", "harness", *_asked(row, manifest)])
    at = [f"compress.{key}={value}" for key, value in point.items()]
    known = manifest.get("spellings")
    spelled = known.get(name) if isinstance(known, Mapping) else None
    if not (isinstance(spelled, list | tuple) and spelled):
        return (base, "", "") if ", " in str(row["stack"]) else (base, _shell([f"compress={row['stack']}"]), _shell(at))
    first, *words = _words(str(spelled[0]))
    own = words[: len(words) - len(point)]
    own = [word for word in own if word not in at and not (point and word.startswith(_POINTS))]
    if not all(map(_override, own)):
        return base, "", ""
    return base, _shell([f"compress={first}", *own]), _shell(at)


def _asked(row: Row, manifest: Mapping[str, Any]) -> list[str]:
    """The overrides of the run, in a sweep those of its own job; without them model, task and mode."""
    given = manifest.get("command")
    asked = [str(one) for one in given if _of_run(str(one))] if isinstance(given, list) else []
    if not asked:
        aware = ["task.query_aware=true"] if row["query_aware"] else []
        return [f"model={row['model']}", f"task={row['task']}", *aware]
    config = manifest.get("config")
    settled = [_settled(one, row, config if isinstance(config, Mapping) else {}) for one in asked if one not in _SWEEP]
    return asked if None in settled else [one for one in settled if one is not None]


def _of_run(override: str) -> bool:
    """Whether an override is of the run, not of a stack."""
    key = override.lstrip("+~").split("=", 1)[0]
    return key not in _ALONE and not key.startswith("compress") and "@compress" not in key


def _settled(override: str, row: Row, config: Mapping[str, Any]) -> str | None:
    """An override with the value that it has in the run of this point; None where a sweep's value cannot be told."""
    key, has, value = override.partition("=")
    values = _split(value, ",")
    if not has or len(values) < 2:
        return override
    mine = {"model": row["model"], "task": row["task"], "task.query_aware": row["query_aware"]}.get(key, _found(config, key))
    known = [one for one in values if one.strip(" '\"").lower() == str(mine).lower()]
    return f"{key}={known[0]}" if known else None


def _found(config: Mapping[str, Any], key: str) -> object:
    """What a resolved configuration holds under a dotted key."""
    value: Any = config
    for part in key.lstrip("+").split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _words(spelled: str) -> list[str]:
    return [word for word in _split(spelled, " ") if word]


def _split(text: str, at: str) -> list[str]:
    """The text cut at a character that stands in no brackets and no quotes."""
    found, depth, quote = [""], 0, ""
    for mark in text:
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        depth += 0 if quote else (mark in _OPEN) - (mark in _CLOSED)
        if mark == at and not quote and depth <= 0:
            found.append("")
        else:
            found[-1] += mark
    return found


def _override(word: str) -> bool:
    return "=" in word or word.startswith("~")


def _shell(words: Sequence[str]) -> str:
    return one_line(shlex.join(words))
