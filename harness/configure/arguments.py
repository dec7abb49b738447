"""The command line before Hydra reads it: spellings that Hydra would merge or misread are refused in one line."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from harness.configure.overrides import is_stack_override, key_of
from harness.errors import UserError, require

GROUPS = ("model", "corpus", "task", "compress", "experiment")
TOP = ("stacks", "limit", "precision", "seed", "results_dir", "memory_limit", "time_limit", "redo", "progress")
KEYS = (*GROUPS, *TOP)


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for a multirun."""
    return any(a in ("-m", "--multirun", "hydra.mode=MULTIRUN") for a in arguments)


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse, before Hydra reads them, the two spellings of several stacks that it would merge or not understand."""
    sweeps = is_sweep(arguments)
    chosen = any(key_of(a) == "compress" for a in arguments)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key_of(argument) == "compress" and value.startswith("["):
            raise UserError(f"{argument} is not possible: compress takes one stack; several are stacks={value}")
        if not chosen and is_stack_override(argument) and "=" in argument:
            raise UserError(
                f"{argument} changes one stack: choose it with compress=NAME (parts of stacks=[...] are changed in their YAML)"
            )
        plain = "=" in argument and not argument.startswith("-") and not any(c in value for c in "[{('\"")
        if plain and "," in value and not sweeps:
            several = f"stacks=[{value}]" if key in ("compress", "stacks") else f"-m {argument}"
            raise UserError(f"{argument} has a comma, which asks for several runs: use {several}, or quote the value")
    check_choices([a for a in arguments if "=" in a or a.startswith("~")])


def check_choices(overrides: Sequence[str]) -> None:
    """Refuse a group's member that is no name, of which Hydra would merge several, and the removal of what every run has."""
    for text in overrides:
        key = key_of(text)
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:  # Hydra itself will say so
            continue
        if override.is_delete() and key in KEYS:
            raise UserError(f"{text} is not possible: every run has it")
        if override.is_delete() or override.is_sweep_override() or not (key in GROUPS or "@" in key or "/" in key):
            continue
        value = override.value()
        value = getattr(value, "text", value)
        group = key.partition("@")[0]
        require(isinstance(value, str) and bool(value), key, value, f"the name of one member of conf/{group}")
