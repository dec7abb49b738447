"""Arguments of the Python face as the overrides that a command line would hold, and their composition by Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from omegaconf import DictConfig

from harness.configure.arguments import check_arguments
from harness.configure.hydra_errors import CompositionError, said
from harness.errors import UserError, require
from harness.files.paths import user_path

CONF = Path(__file__).parents[2] / "conf"
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_READ_OTHERWISE = {"null", "true", "false", "inf", "nan"}  # words that Hydra takes for something else than a text


@contextmanager
def composed(overrides: Sequence[str]) -> Iterator[DictConfig]:
    """The configuration of a command line; while it is open, stacks can be composed beside it.

    A Hydra that the caller's program runs is put aside meanwhile.

    Raises:
        UserError: what Hydra cannot compose, in one line.
    """
    check_arguments(overrides)
    before = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            yield hydra.compose("config", overrides=list(overrides))
    except CompositionError as error:
        raise UserError(said(error)) from None
    finally:
        restore_gh_from_backup(before)


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
