"""What `python -m harness` does between the configuration and the printed folder; it knows no stage and no task."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from harness.analysis.findings import Findings
from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.configure.again import again
from harness.configure.arms import FULL, arms_of
from harness.errors import UserError
from harness.evaluation.assemble import assemble, results_folder
from harness.evaluation.notices import notices
from harness.evaluation.recorder import Planned, asked
from harness.pages.outputs import write_all
from harness.pages.table import show
from harness.records.current import Record, current_records, other_version
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
    spelled = {cell.name: cell.spellings for cell in found if len(cell.spellings) > 1}
    for name, spellings in spelled.items():
        print(f"{name} is one point for what comes to the same: {'; '.join(spellings)}")
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    bench = assemble(config, found)
    store: Store[Planned] = Store(results_folder(config) / bench.setup.run_id, redo=bench.options.redo)
    try:
        runner = bench.runner(store)
        works = bench.works(runner)
        for line in notices(bench.task, bench.lm.tokens, works):
            print(f"warning: {line}", file=sys.stderr)
        manifest = bench.manifest(found)
        store.write_manifest(manifest | {"asked": asked(works), "spellings": spelled})
        keys = {one.key: (one.seed, str(one.example.id), one.cell.name) for one in works}
        earlier = other_version(store.folder, keys) if store.done - keys.keys() else None
        if earlier:
            print(earlier)
        failures = runner.run(works)
    finally:
        store.close()
    try:
        loaded, stale = current_records(store.folder)
        findings = write_all(store.folder, manifest, loaded)
    except UserError as error:
        raise UserError(f"{error}; finished records are safe, the same command writes the rest") from None
    mine = [record for record in loaded if record["key"] in keys]
    _show(loaded.records, mine, findings)
    if stale:
        print(stale)
    return store.folder, _outcome(mine, keys.keys() - store.done, failures, overrides)


def _show(records: list[Record], mine: list[Record], found: Findings) -> None:
    """The table of what was asked for; the folder's page holds all of its records."""
    if len(mine) == len(records):
        show(found.points)
        return
    show(rank(points(mine)))
    print(f"{len(records) - len(mine)} more records of this run are in its points.csv and dashboard.html")


def _outcome(mine: list[Record], unmade: Set[str], failures: Sequence[str], overrides: Sequence[str]) -> int:
    """Say how what was asked for went; returns how many records failed, or all were refused.

    `unmade` are the keys of which this run made no record that counts: with `redo`, older records may be there.
    """
    status = Counter(str(record["status"]) for record in mine)
    counts = [f"{status['ok']} ok", f"{status['failed']} failed"]
    counts += [f"{status[name]} {words}" for name, words in OTHERS.items() if status[name]]
    print(", ".join(counts))
    older = len(unmade & {record["key"] for record in mine if record["status"] in FINAL})
    if older:
        print(f"{older} could not be made again: the older records count; the last one: {''.join(failures[-1:])}")
    bad: int = status["failed"] + older
    if bad:
        hydra = HydraConfig.get() if HydraConfig.initialized() else None
        what = "the same command runs all" if older else "only what failed runs"
        print(f"{what} again with: {again(overrides, hydra, redo=bool(older))}")
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
