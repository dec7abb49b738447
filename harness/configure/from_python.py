"""Arguments of the Python face as the overrides that a command line would hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from omegaconf import DictConfig

from harness.configure.arguments import check_arguments
from harness.configure.compose import compose
from harness.errors import require
from harness.files.paths import CONF, user_path

_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_READ_OTHERWISE = {"null", "true", "false", "inf", "nan"}  # words that Hydra takes for something else than a text


def composed(overrides: Sequence[str]) -> DictConfig:
    """The configuration of a command line, refused in the same words (UserError)."""
    check_arguments(overrides)
    return compose(overrides)


def overrides_of(values: Mapping[str, Any], under: str = "") -> list[str]:
    """KEY=VALUE for each argument; in a keyword `__` is a dot, as in scikit-learn: task__lengths=[300].

    Args:
        values: by key, dotted or with `__`.
        under: what keys are relative to; a group's choice (`codec@compress.keys`) never is.
    """
    keys = {key: key.replace("__", ".") for key in values}
    return [f"{key if '@' in key or not under else f'{under}.{key}'}={spelled(values[given])}" for given, key in keys.items()]


def model_overrides(model: str | PathLike[str]) -> list[str]:
    """A member of conf/model, a folder with a model, or a repository ORG/NAME of the hub."""
    name = fspath(model)
    require(isinstance(name, str) and bool(name), "model", model, "a member of conf/model, a folder, or a repository ORG/NAME")
    if (CONF / "model" / f"{name}.yaml").is_file():
        return overrides_of({"model": name})
    if user_path(name).is_dir():
        return overrides_of({"model": "local", "model.path": name})
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return overrides_of({"model": "hub", "model.repo": name})
    return overrides_of({"model": name})  # Hydra names the members there are


def spelled(value: Any) -> str:
    """A plain value in Hydra's grammar, so that reading it gives the value back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | PathLike):
        return _text(str(fspath(value)))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_text(str(key))}:{spelled(one)}" for key, one in value.items()) + "}"
    require(isinstance(value, Sequence), "an override", value, "a number, a text, true, false, None, a list or a dictionary")
    return "[" + ",".join(map(spelled, value)) + "]"


def _text(text: str) -> str:
    """Quoted unless it is a plain word; `${` stays text."""
    if _WORD.fullmatch(text) and text.lower() not in _READ_OTHERWISE:
        return text
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{text}'"
