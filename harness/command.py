"""What `python -m harness` does between the configuration and the printed folder."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from harness.analysis.findings import Findings
from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.configure.again import again
from harness.configure.arms import FULL, Arm, arms_of
from harness.configure.typed import build
from harness.errors import UserError
from harness.evaluation.adaptive import Adaptive
from harness.evaluation.assemble import Build, assemble, results_folder
from harness.evaluation.notices import notices
from harness.evaluation.planned import Planned, asked
from harness.files.json_values import Config, Json
from harness.pages.outputs import write_all
from harness.pages.table import show
from harness.records.current import current_records, other_version
from harness.records.schema import FINAL
from harness.records.store import Store
from harness.sweep.outcome import Refused

OTHERS = {"refused": "refused (not possible for the example, as said above)", "not_exercised": "not compressed (too short)"}


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a run came to.

    Attributes:
        folder: the run folder.
        asked: keys of the records that were asked for.
        missing: of these, keys of which no record was made that counts; with `redo`, older records may be there.
        failures: a line for each failure.
        records: all records of the folder that are this run's.
        stale: one line on records that are not this run's any more, None where there are none.
        findings: points, frontier and curves of `records`.
    """

    folder: Path
    asked: frozenset[str]
    missing: frozenset[str]
    failures: tuple[str, ...]
    records: list[Json]
    stale: str | None
    findings: Findings

    @property
    def mine(self) -> list[Json]:
        """The records that were asked for."""
        return [record for record in self.records if record["key"] in self.asked]


LOOSE = (
    "batch_invariant does not hold for this model: tried, its logits differ in their last bits with what shares the batch; "
    "records say false"
)


def execute(cfg: DictConfig, overrides: Sequence[str]) -> tuple[Path, int]:
    """Run one configuration. UserError before any model loads where possible.

    Returns:
        (run folder, records that failed; where there are none but nothing that was asked for could be made, those refused).
    """
    config: Json = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    made = make(config, arms_of(cfg, overrides))
    _show(made)
    return made.folder, _outcome(made, overrides)


def make(config: Config, found: Sequence[Arm], build: Build = build) -> Made:
    """Make the missing records of these arms, and the files that are derived from all records of the folder."""
    _quiet()
    spelled = {arm.name: arm.spellings for arm in found if len(arm.spellings) > 1}
    for name, spellings in spelled.items():
        print(f"{name} is one point for what comes to the same: {'; '.join(spellings)}")
    bench = assemble(config, found, build=build)
    store: Store[Planned] = Store(results_folder(config) / bench.setup.run_id, redo=bench.options.redo)
    try:
        runner = bench.runner(store)
        planned = bench.planned(runner)
        loose = bench.options.batch_invariant and not bench.setup.batch_invariant
        for line in [*([LOOSE] if loose else []), *notices(bench.task, bench.lm.tokens, planned)]:
            print(f"warning: {line}", file=sys.stderr)
        manifest = bench.manifest(found) | {"spellings": {arm.name: arm.spellings for arm in found}}
        keys = {one.key: (one.seed, str(one.example.id), one.arm.name) for one in planned}
        earlier = other_version(store.folder, keys) if store.done - keys.keys() else None
        if earlier:
            print(earlier)
        failures, adaptive = list[str](), Adaptive(planned, store, bench.options.precision)
        wanted: list[Planned] = []
        for part in adaptive if bench.options.auto else [planned]:
            store.write_manifest(manifest | {"asked": asked(part)})
            failures += bench.run(store, runner, part)
            wanted += part
        keys = {one.key: keys[one.key] for one in wanted}
        for line in _resolved(adaptive) if bench.options.auto else ():
            print(line)
    finally:
        store.close()
    try:
        loaded, stale = current_records(store.folder)
        findings = write_all(store.folder, manifest, loaded)
    except UserError as error:
        raise UserError(f"{error}; finished records are safe, the same command writes the rest") from None
    return Made(
        folder=store.folder,
        asked=frozenset(keys),
        missing=frozenset(keys.keys() - store.done),
        failures=tuple(failures),
        records=loaded.records,
        stale=stale,
        findings=findings,
    )


def _resolved(adaptive: Adaptive) -> Iterator[str]:
    """How many documents each arm took under limit=auto, and which are not resolved."""
    for name, units in adaptive.took.items():
        yield f"{name}: resolved by {units} documents"
    if adaptive.left:
        yield f"not resolved to {adaptive.precision:g} by the documents that were asked: {', '.join(adaptive.left)}"


def _show(made: Made) -> None:
    """The table of what was asked for; the folder's page holds all of its records."""
    others = len(made.records) - len(made.mine)
    show(rank(points(made.mine)) if others else made.findings.points)
    if others:
        print(f"{others} more records of this run are in its points.csv and dashboard.html")
    if made.stale:
        print(made.stale)


def _outcome(made: Made, overrides: Sequence[str]) -> int:
    """Say how what was asked for went; returns how many records failed, or all were refused."""
    print(counted(made.mine))
    failed: int = sum(record["status"] == "failed" for record in made.mine)
    older = len(made.missing & {record["key"] for record in made.mine if record["status"] in FINAL})
    if older:
        print(f"{older} could not be made again: the older records count; the last one: {''.join(made.failures[-1:])}")
    if failed or older:
        hydra = HydraConfig.get() if HydraConfig.initialized() else None
        what = "the same command runs all" if older else "only what failed runs"
        print(f"{what} again with: {again(overrides, hydra, redo=bool(older))}")
    wanted = [record for record in made.mine if record["stack"] != FULL] or made.mine
    refused = [record for record in wanted if record["status"] == "refused"]
    if refused and len(refused) == len(wanted):
        print(f"nothing that was asked for could be made: all {len(refused)} records were refused")
        return failed + older or Refused(len(refused))
    return failed + older


def counted(records: Sequence[Config]) -> str:
    """How many records came out how, in one line."""
    status = Counter(str(record["status"]) for record in records)
    counts = [f"{status['ok']} ok", f"{status['failed']} failed"]
    return ", ".join(counts + [f"{status[name]} {words}" for name, words in OTHERS.items() if status[name]])


def _quiet() -> None:
    """Libraries' notes do not belong between a progress bar and a table."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")
