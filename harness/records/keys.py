"""What makes two records the same record: run ids, record keys, the code and library versions in them; and manifests."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name

from harness.files.digests import digest
from harness.files.json_values import Config, Json
from harness.files.paths import folder_name, user_path

PACKAGE = Path(__file__).parents[1]
KEY_SOURCES = (  # every room that can change a record; reports, pages, launchers and how records get to disk cannot
    *(
        "types.py",
        "errors.py",
        "fields.py",
        "files",
        "stages",
        "kv",
        "models",
        "engine",
        "configure",
        "calibrate",
        "lm_eval",
        "evaluation",
    ),
)
OURS = ("harness.", "tasks.")
LIBRARIES = ("torch", "transformers", "lm-eval")
ALSO = ("kv-harness", "tokenizers", "numpy", "hydra-core", "datasets")  # in manifests, not in keys


def run_id(model: str, task: str, config: Config) -> str:
    """`<model>-<task>-<hash8>`, one folder whatever the names; config is the resolved one without stacks, points and limit."""
    return f"{folder_name(model) or 'model'}-{folder_name(task) or 'task'}-{digest(config)[:8]}"


def record_key(example: str, arm: str) -> str:
    """Key of one record from the digests of its example, with all it is run with, and of its arm."""
    return digest([example, arm])


def versions() -> dict[str, str]:
    """Versions of the libraries that can change a number."""
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def targets(config: object) -> Iterator[str]:
    """Every `_target_` of a configuration tree that a module file holds; what has none brings the digest of its source."""
    if isinstance(config, Mapping):
        if isinstance(config.get("_target_"), str) and "_source_" not in config:
            yield config["_target_"]
        for value in config.values():
            yield from targets(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from targets(value)


def named_files(config: object) -> Iterator[Path]:
    """Every existing file that a configuration tree names under the key `file`."""
    if isinstance(config, Mapping):
        if isinstance(config.get("file"), str) and (path := _there(config["file"])) is not None:
            yield path
        for value in config.values():
            yield from named_files(value)


def _there(text: str) -> Path | None:
    """The file of this name; None where there is none, as of a name that no file system takes."""
    try:
        path = user_path(text)
        return path if path.is_file() else None
    except (OSError, ValueError):  # UserError is one: the home of somebody unknown
        return None


def _outside(target: str) -> set[str]:
    """Modules outside the project that a `_target_` is named in, is defined in, and that its base classes live in."""
    if target.startswith(OURS):
        return set()
    found = resolve_name(target)
    named = next(name for name in _above(target) if name in sys.modules)
    modules = {named, *(one.__module__ for one in getattr(found, "__mro__", (found,)) if getattr(one, "__module__", None))}
    return {name for name in modules if not f"{name}.".startswith((*OURS, "builtins.", "typing."))}


def _above(target: str) -> Iterator[str]:
    """The dotted names that a target is in, the nearest first: a class may be defined in a class."""
    while "." in target:
        target = target.rpartition(".")[0]
        yield target


@lru_cache
def _hash_files(paths: tuple[Path, ...]) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def code_hash(config: Config) -> str:
    """SHA-256 of what a record depends on: our rooms that can change one, tasks, `_target_` files of others, files it names."""
    files = [p for name in KEY_SOURCES for p in sorted((PACKAGE / name).rglob("*.py")) or [PACKAGE / name]]
    files += sorted((PACKAGE.parent / "tasks").rglob("*.py"))  # a task's helpers decide its prompts as much as its own file
    for name in sorted({m for target in targets(config) for m in _outside(target)}):
        file = getattr(importlib.import_module(name), "__file__", None)
        files += [Path(file)] if file else []
    files += sorted(set(named_files(config)))
    return _hash_files(tuple(files))


def other_code(manifest: Config) -> bool:
    """Whether a manifest is of other code than this; False where only importing or reading what it names could tell."""
    config = manifest["config"]
    alone = all(target.startswith(OURS) for target in targets(config)) and not any(named_files(config))
    return alone and manifest.get("code_sha256", code_hash({})) != code_hash({})


def manifest(config: object, model: Config, corpus: Config, arms: list[str]) -> Json:
    """What an invocation was: configuration, versions, machine, revision, digests."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="microseconds"),  # the last one says which records are stale
        "command": sys.argv[1:],
        "config": config,
        "arms": arms,
        "model": dict(model),
        "corpus": dict(corpus),
        "versions": versions() | {"python": platform.python_version()} | {name: _version(name) for name in ALSO},
        "machine": machine(),
        "git_revision": _git_revision(),
        "code_sha256": code_hash(config if isinstance(config, Mapping) else {}),
    }


def machine() -> Json:
    """What can change the last digits of a number or its run time: the machine, its accelerators, threads, determinism."""
    import torch  # a report knows keys, and does without it

    cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "node": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in cuda],
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _git_revision() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except OSError:
        return None
    return done.stdout.strip() or None
