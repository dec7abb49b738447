"""`python -m harness -m ...`: the sweep as a Hydra plugin. Plan, launch, report.

Hydra takes plugins only from its own namespace package, so `register` gives ours a module there.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.configure.again import again
from harness.configure.arguments import check_choices
from harness.configure.arms import Arm, arms_of
from harness.configure.hydra_errors import CompositionError, said
from harness.configure.overrides import is_stack_override, key_of
from harness.configure.typed import check_types
from harness.engine.batches import one_line
from harness.errors import UserError
from harness.evaluation.assemble import run_folder
from harness.files.paths import user_path
from harness.pages import table
from harness.pages.outputs import merge, write_all
from harness.records.progress import Snapshot, asked_since, snapshot
from harness.records.shards import load_records
from harness.records.sweep_folder import SUMMARY
from harness.sweep import outcome
from harness.sweep.fold import Job, fold, quoted
from harness.sweep.launch_joblib import JoblibLauncher
from harness.sweep.launch_ray import RayLauncher
from harness.sweep.launch_submitit import SubmititLauncher
from harness.sweep.lost import record_lost
from harness.sweep.relaunch import Ended, run_all
from harness.sweep.supervise import printed

NAMESPACE, OURS = "hydra_plugins", "hydra_plugins.kv_harness"
LAUNCHERS = ("joblib", "slurm", "submitit_local", "ray")


@dataclass(frozen=True)
class Planned:
    """A job that has been composed: its arms and the run folder it writes to."""

    job: Job
    arms: list[Arm]
    folder: Path

    def line(self, common: set[str]) -> str:
        """The job as the plan shows it: what tells it from the others, its stacks, where its records go."""
        counts = Counter(arm.label for arm in self.arms)
        stacks = "; ".join(label if n == 1 else f"{label} ({n} points)" for label, n in counts.items())
        own = " ".join(o for o in self.job.shared if o not in common)
        return f"{own + ': ' if own else ''}{len(self.arms)} arms: {stacks} -> {self.folder}"


class FoldedSweeper(Sweeper):
    """Runs every combination of the swept values, those that differ only in the stack in one job."""

    config: DictConfig
    context: HydraContext
    launcher: Launcher

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher; exits with one line where it cannot be had."""
        self.context, self.config = hydra_context, config
        try:
            _check(config)
            self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
        except Exception as error:
            cause = next((e for e in (error, error.__cause__) if isinstance(e, UserError)), None)
            if cause is None:
                raise
            sys.exit(f"error: {cause}")

    def sweep(self, arguments: list[str]) -> None:
        """Plan, run and report; exits with 1 if anything failed."""
        try:
            failed = self._sweep([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        except UserError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit("interrupted: the same command does what is missing; jobs that a cluster has go on")
        if failed:
            sys.exit(1)

    def _sweep(self, arguments: list[str]) -> bool:
        overrides = OverridesParser.create(config_loader=self.context.config_loader).parse_overrides(arguments)
        plan = self._plan(fold(overrides))
        folder = self._folder()
        print(f"{len(plan)} jobs, {sum(len(one.arms) for one in plan)} arms; the sweep's own files are in {folder}")
        common = set(plan[0].job.shared).intersection(*(one.job.shared for one in plan))
        for number, one in enumerate(plan):
            print(f"  job {number}: {one.line(common)}", flush=True)
        before = {one.folder: snapshot(one.folder) for one in plan}
        ended = run_all([one.job for one in plan], self.launcher.launch, folder, lambda line: print(line, flush=True))
        homes = {one.job.shared: one.folder for one in plan}
        (folder / SUMMARY).write_text(json.dumps([_row(one, homes) for one in ended], indent=1), encoding="utf-8")
        self._record_lost(ended, folder, lambda job: before[homes[job.shared]])
        _report(list(dict.fromkeys(homes.values())), folder, ended, self.config.hydra, before)
        return any(one.outcome.status != "ok" for one in ended)

    def _plan(self, jobs: Sequence[Job]) -> list[Planned]:
        """Compose every job and all of its stacks, so that a mistake in the last one stops the first."""
        found: dict[tuple[str, ...], list[Arm]] = {}
        plan = []
        for job in jobs:
            try:
                check_choices(job.overrides)
                cfg = self._compose(job)
                key = (str(cfg.stacks), *(o for o in job.overrides if is_stack_override(o)))
                if key not in found:
                    found[key] = arms_of(cfg, job.overrides)
                config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
                plan.append(Planned(job, found[key], run_folder(config)))
            except CompositionError as error:
                raise UserError(f"{' '.join(job.overrides)}: {said(error)}") from None
        return plan

    def _compose(self, job: Job) -> DictConfig:
        cfg = self.context.config_loader.load_sweep_config(self.config, job.overrides)
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])

    def _record_lost(self, ended: Sequence[Ended], folder: Path, before: Callable[[Job], Snapshot]) -> None:
        """Failed records for what jobs that were cut off did not come to; records that this sweep made stay as they are."""
        for one in ended:
            place = folder / str(one.number)
            if one.outcome.status != "crashed" or not outcome.has_started(place):
                continue
            try:
                cfg = self._compose(one.job)
                config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
                record_lost(config, arms_of(cfg, one.job.overrides), one.outcome.reason, printed(place), before(one.job))
            except Exception as error:  # the report of all others is worth more
                print(f"job {one.number}: what it did not come to is missing, not failed: {one_line(error)}", file=sys.stderr)

    def _folder(self) -> Path:
        """The sweep's own folder, new: an old one holds outcomes of other jobs under the same numbers."""
        folder = Path(str(self.config.hydra.sweep.dir))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"hydra.sweep.dir={folder} is there already: every sweep needs a folder of its own") from None
        except OSError as error:
            raise UserError(f"hydra.sweep.dir={folder} cannot be made: {error.strerror}") from None
        return folder


def _check(config: DictConfig) -> None:
    """Refuse a launcher's setting of the wrong type; the sweep's folder may be in the home folder."""
    launcher = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    check_types(launcher, "hydra.launcher")
    folder = str(config.hydra.sweep.dir)
    if folder.startswith("~"):
        with open_dict(config):
            config.hydra.sweep.dir = str(user_path(folder))
            given = [o for o in config.hydra.overrides.hydra if key_of(o) != "hydra.sweep.dir"]
            config.hydra.overrides.hydra = [
                *given,
                f"hydra.sweep.dir={quoted(config.hydra.sweep.dir)}",
            ]  # what jobs are composed of


def _row(one: Ended, homes: Mapping[tuple[str, ...], Path]) -> dict[str, Any]:
    run = {"run": str(homes[one.job.shared]), "cwd": str(Path.cwd())}
    return {"job": one.number, "overrides": one.job.overrides, **run, **asdict(one.outcome)}


def _report(runs: Sequence[Path], folder: Path, ended: Sequence[Ended], hydra: Any, before: Mapping[Path, Snapshot]) -> None:
    """One report a run and, of several runs, one over all; how jobs and records went; last, where everything is."""
    reported: list[Path] = []
    for run in runs:
        with _or_said(f"no report of {run}"):
            found = write_all(run)
            reported.append(run)
    page = folder / "dashboard.html"
    if len(reported) > 1:
        with _or_said("no report over all runs"):
            merge(reported, page)
    elif reported:
        table.show(found.points)
    failures = [one for one in ended if one.outcome.status != "ok"]
    for one in failures:
        print(f"job {one.number} failed: {one.outcome.reason}", file=sys.stderr)
        print(f"  again: {again(one.job.overrides, hydra)}", file=sys.stderr)
    records = Counter(status for run in reported for status in _statuses(run, before[run]))
    print(f"jobs: {len(ended) - len(failures)} ok, {len(failures)} failed; records: {_counts(records)}")
    for path in [*reported, *([page] if page.exists() else [])]:
        print(path)


@contextmanager
def _or_said(what: str) -> Iterator[None]:
    """A report that cannot be made costs a line: which jobs failed is worth more."""
    try:
        yield
    except Exception as error:
        print(f"{what}: {error if isinstance(error, UserError) else one_line(error)}", file=sys.stderr)


def _statuses(run: Path, before: Snapshot) -> list[str]:
    """Of the records that this sweep asked for, and of those made for its jobs that died."""
    loaded = load_records(run)
    mine = asked_since(run, before) | before.new(loaded.tries)
    return [str(record["status"]) for record in loaded if record["key"] in mine]


def _counts(records: Mapping[str, int]) -> str:
    known = dict.fromkeys(["ok", "failed", *records])
    return ", ".join(f"{records[status]} {status}" for status in known if status in records) or "none"


def register() -> None:
    """Make our plugins known to Hydra under `hydra_plugins.kv_harness`, in this process."""
    plugins = Plugins.instance()  # it scans when it is made, the namespace package of installed plugins included
    try:
        namespace = importlib.import_module(NAMESPACE)
    except ImportError:  # no plugin is installed
        namespace = sys.modules[NAMESPACE] = ModuleType(NAMESPACE)
        namespace.__path__ = []
    module = sys.modules[OURS] = ModuleType(OURS)
    setattr(namespace, OURS.split(".")[1], module)
    for plugin in (FoldedSweeper, JoblibLauncher, SubmititLauncher, RayLauncher):
        setattr(module, plugin.__name__, plugin)
        plugins.class_name_to_class[f"{OURS}.{plugin.__name__}"] = plugin
    for name in LAUNCHERS:  # an installed plugin's schema of the same name would be merged into our file
        ConfigStore.instance().repo["hydra"]["launcher"].pop(f"{name}.yaml", None)
