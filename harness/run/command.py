"""What `python -m harness` does between the configuration and the printed folder; it knows no stage and no task."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError, require
from harness.run.again import again
from harness.run.assemble import assemble, results_folder
from harness.run.cells import FULL, cells, is_stack_override, key_of
from harness.run.current import current_records
from harness.run.notices import notices
from harness.run.outcome import Refused
from harness.run.pareto import rank
from harness.run.points import points
from harness.run.recorder import Work, asked
from harness.run.report import write_all
from harness.run.schema import FINAL
from harness.run.store import Store
from harness.run.table import show

GROUPS = ("model", "corpus", "task", "compress", "experiment")
TOP = ("stacks", "limit", "seed", "results_dir", "memory_limit", "time_limit", "redo", "progress")
KEYS = (*GROUPS, *TOP)
OTHERS = {"refused": "refused (not possible for the example, as said above)", "not_exercised": "not compressed (too short)"}


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


def execute(cfg: DictConfig, overrides: Sequence[str]) -> tuple[Path, int]:
    """Run one configuration. UserError before any model loads where possible.

    Returns:
        (run folder, records that failed; where there are none but nothing that was asked for could be made, those refused).
    """
    _quiet()
    found = cells(cfg, overrides)
    spelled = {cell.name: cell.spellings for cell in found if len(cell.spellings) > 1}
    for name, spellings in spelled.items():
        print(f"{name} is one point for what comes to the same: {'; '.join(spellings)}")
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    bench = assemble(config, found)
    store: Store[Work] = Store(results_folder(config) / bench.setup.run_id, redo=bench.options.redo)
    try:
        runner = bench.runner(store)
        works = bench.works(runner)
        for line in notices(bench.task, bench.lm.tokens, works):
            print(f"warning: {line}", file=sys.stderr)
        manifest = bench.manifest(found)
        store.write_manifest(manifest | {"asked": asked(works), "spellings": spelled})
        failures = runner.run(works)
    finally:
        store.close()
    try:
        write_all(store.folder, manifest)
    except UserError as error:
        raise UserError(f"{error}; finished records are safe, the same command writes the rest") from None
    return store.folder, _show(store, overrides, failures)


def _show(store: Store[Work], overrides: Sequence[str], failures: Sequence[str]) -> int:
    """The table of what was asked for, and how many of it failed; the folder's page holds all of its records."""
    loaded, stale = current_records(store.folder)
    records = loaded.records
    mine = [record for record in records if record["key"] in store.asked]
    show(rank(points(mine)))
    if len(mine) < len(records):
        print(f"{len(records) - len(mine)} more records of this run are in its points.csv and dashboard.html")
    if stale:
        print(stale)
    status = Counter(str(record["status"]) for record in mine)
    counts = [f"{status['ok']} ok", f"{status['failed']} failed"]
    counts += [f"{status[name]} {words}" for name, words in OTHERS.items() if status[name]]
    print(", ".join(counts))
    stand = len(store.unmade & {record["key"] for record in mine if record["status"] in FINAL})
    if stand:
        print(f"{stand} could not be made again: the older records stand; the last one: {''.join(failures[-1:])}")
    if status["failed"] or stand:
        hydra = HydraConfig.get() if HydraConfig.initialized() else None
        what = "the same command runs all" if stand else "only what failed runs"
        print(f"{what} again with: {again(overrides, hydra, redo=bool(stand))}")
    bad: int = status["failed"] + stand
    wanted = [record for record in mine if record["stack"] != FULL] or mine
    refused = sum(record["status"] == "refused" for record in wanted)
    if refused and refused == len(wanted):
        print(f"nothing that was asked for could be made: all {refused} records were refused")
        return bad or Refused(refused)
    return bad


def _quiet() -> None:
    """Libraries' notes do not belong between a progress bar and a table."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")
