"""What `python -m harness` does between the configuration and the printed folder."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.configure.again import again
from harness.configure.arms import FULL, arms_of
from harness.errors import UserError
from harness.evaluation.assemble import assemble, results_folder
from harness.evaluation.notices import notices
from harness.evaluation.planned import Planned, asked
from harness.pages.run_folder import write_all
from harness.pages.table import show
from harness.records.current import current_records
from harness.records.schema import FINAL
from harness.records.store import Store
from harness.sweep.outcome import Refused

OTHERS = {"refused": "refused (not possible for the example, as said above)", "not_exercised": "not compressed (too short)"}


def execute(cfg: DictConfig, overrides: Sequence[str]) -> tuple[Path, int]:
    """Run one configuration. UserError before any model loads where possible.

    Returns:
        (run folder, records that failed; where there are none but nothing that was asked for could be made, those refused).
    """
    _quiet()
    found = arms_of(cfg, overrides)
    spelled = {arm.name: arm.spellings for arm in found if len(arm.spellings) > 1}
    for name, spellings in spelled.items():
        print(f"{name} is one point for what comes to the same: {'; '.join(spellings)}")
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    bench = assemble(config, found)
    store: Store[Planned] = Store(results_folder(config) / bench.setup.run_id, redo=bench.options.redo)
    try:
        runner = bench.runner(store)
        planned = bench.planned(runner)
        for line in notices(bench.task, bench.lm.tokens, planned):
            print(f"warning: {line}", file=sys.stderr)
        manifest = bench.manifest(found)
        store.write_manifest(manifest | {"asked": asked(planned), "spellings": spelled})
        failures = bench.run(store, runner, planned)
    finally:
        store.close()
    try:
        write_all(store.folder, manifest)
    except UserError as error:
        raise UserError(f"{error}; finished records are safe, the same command writes the rest") from None
    return store.folder, _show(store, overrides, failures)


def _show(store: Store[Planned], overrides: Sequence[str], failures: Sequence[str]) -> int:
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
