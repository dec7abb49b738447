"""The command line that runs a job again: its overrides, and where its configurations were found."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from harness.configure.overrides import key_of


def sources(hydra: Any) -> list[str]:
    """Arguments that name the configuration folders beside ours; `hydra` is Hydra's own part of the configuration."""
    flags = [a for s in hydra.runtime.config_sources if s.provider == "command-line" for a in ("--config-dir", s.path)]
    return flags + [o for o in hydra.overrides.hydra if o.lstrip("+").startswith("hydra.searchpath")]


def again(overrides: Sequence[str], hydra: Any | None, *, redo: bool = True) -> str:
    """The same command; with `redo` False without what forces finished records, so that it makes what is missing or failed."""
    kept = [one for one in overrides if redo or key_of(one) != "redo"]
    return shlex.join(["python", "-m", "harness", *(sources(hydra) if hydra is not None else []), *kept])
