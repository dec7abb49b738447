"""The command `python -m harness.verify RUN`: makes a sample of a run's records again and compares. It changes no run."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.configure.arms import Arm
from harness.configure.trusted import Builder, check_rest
from harness.engine.batches import parse_bytes
from harness.errors import UserError, require
from harness.evaluation.assemble import Bench, assemble
from harness.evaluation.planned import Planned
from harness.files.pipes import end_with_reader
from harness.files.plain_files import printable, say_once
from harness.records.current import ANOTHER, current_records
from harness.records.failures import bare
from harness.records.keys import other_code
from harness.records.progress import manifests
from harness.records.schema import FINAL
from harness.records.store import Store
from harness.types import SCHEMA

Json = dict[str, Any]

SAMPLE = 10
Name = tuple[int, str, str]  # of a record: seed, example, arm
ALLOW = (
    "a module of your own that the run's parts may come from (repeatable); without it only this project's classes are made, "
    "and no other module is imported"
)
TOLERANCE = 1e-4  # of numbers that are not whole: what other requests in a batch may change in their last digits
COMPARED = (
    *("status", "prompt_sha256", "n_prompt", "output", "stop_reason", "score", "metrics", "weight"),
    *("tokens_seen", "tokens_kept", "entries_touched", "tokens_merged", "codec_info", "storage", "layer_budget", "bytes"),
    *("kv_bytes_context", "kv_bytes_final", "kv_bytes_peak", "kv_bytes_peak_prefill", "kv_bytes_full", "kv_bytes_full_final"),
)
# What follows from another answer to the same prompt and the same compressed context.
OF_ANSWER = {"output", "stop_reason", "score", "metrics", "kv_bytes_final", "kv_bytes_peak", "kv_bytes_full_final"}
BATCH = (
    "Without batch_invariant, what decodes beside an answer changes the order of its sums, and where two tokens nearly tie the "
    "other one wins: here a sample decodes together, in the run all stacks did. What was kept and stored is promised equal, "
    "free answers are not (harness/README.md, Verify)"
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of it.

    Attributes:
        checked: records made again.
        different: a line for every one that is not the same.
        answers: how many of those were made without batch_invariant and differ in their answers alone: the same was kept and
            stored.
        other_version: how many were made by another version of the code, a library or the model.
    """

    checked: int
    different: list[str]
    answers: int
    other_version: int


def verify(folder: Path, sample: int = SAMPLE, allow: Collection[str] = ()) -> Verdict:
    """Make `sample` finished records of a run again (the same ones every time), from the configuration it was run with.

    Args:
        folder: the run; it may be anybody's, for nothing in it chooses what code runs.
        sample: how many records.
        allow: modules outside the project that its parts may come from, and settings that let code run.

    Raises:
        UserError: no records, no manifest, a configuration that cannot be run here or that names code of nobody known.
    """
    require(sample > 0, "--sample", sample, "a positive number of records")
    loaded, stale = current_records(folder)
    if stale:
        say_once(stale)
    records = [record for record in loaded if record["status"] in FINAL]
    found = manifests(folder)
    if not records or not found:
        raise UserError(f"{folder} has no {'finished records' if found else 'manifest'}: there is nothing to verify")
    chosen = choose(records, sample)
    bench = _assembled(found, chosen, Builder(frozenset(allow)), folder)
    with tempfile.TemporaryDirectory() as scratch:
        made = _made(bench, Path(scratch), chosen)
    different = [line for record in chosen for line in differences(record, made.get(_name(record)))]
    loose = [record for record in chosen if not record["batch_invariant"]]
    answers = sum(answer_alone(record, made.get(_name(record))) for record in loose)
    other = sum(_name(record) in made and made[_name(record)]["key"] != record["key"] for record in chosen)
    return Verdict(checked=len(chosen), different=different, answers=answers, other_version=other)


def _assembled(invocations: Sequence[Json], chosen: Sequence[Json], build: Builder, folder: Path) -> Bench:
    """What makes the chosen records again; UserError where their run cannot be had here, or not any more."""
    config = _config(invocations)
    try:
        check_rest(config)
        arms = {_arm_of(record): _arm(record, build) for record in chosen}
        return assemble(config, list(arms.values()), build=build)
    except UserError as error:
        if all(record["schema"] == SCHEMA for record in chosen) and not other_code(invocations[-1]):
            raise
        raise UserError(f"{folder} was {ANOTHER}, and cannot be made again by this one: {error}") from None


def _config(found: Sequence[Json]) -> Json:
    """The newest invocation's configuration, but what decides only whether a record can be made is the widest of them all."""
    widest = max((one["config"]["memory_limit"] for one in found), key=lambda limit: parse_bytes("memory_limit", limit))
    config: Json = found[-1]["config"]
    return config | {"progress": False, "time_limit": None, "redo": False, "memory_limit": widest}


def choose(records: Sequence[Json], sample: int) -> list[Json]:
    """A sample in which every arm has its turn before any has a second one."""
    by_arm: dict[str, list[Json]] = {}
    for record in random.Random(0).sample(list(records), len(records)):
        by_arm.setdefault(_arm_of(record), []).append(record)
    turns = sorted(((turn, record) for same in by_arm.values() for turn, record in enumerate(same)), key=lambda pair: pair[0])
    return [record for _, record in turns[:sample]]


def differences(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> list[str]:
    """Nothing where the two are equal, else one line that names the fields."""
    where = f"{old['stack']} {old['point']} {old['example_id']} seed {old['seed']}"
    if new is None:
        return [f"{where}: its example does not exist any more"]
    if new["status"] not in FINAL:
        return [f"{where}: it could not be made again: {bare(str(new['error']))}"]  # its traceback's folder is gone by now
    unlike = _unlike(old, new)
    fields = [name for name in COMPARED if name in unlike]
    shown = ", ".join(f"{name} was {_short(old[name])}, now {_short(new[name])}" for name in fields[:3])
    return [f"{where}: {shown}{', ...' if len(fields) > 3 else ''}"] if fields else []


def answer_alone(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> bool:
    """Whether two records differ, and in nothing but the answer and what follows from it."""
    fields = _unlike(old, new)
    return bool(fields) and fields <= OF_ANSWER


def _unlike(old: Mapping[str, Any], new: Mapping[str, Any] | None) -> set[str]:
    """The fields that differ; none where the record could not be made again."""
    return set() if new is None else {name for name in COMPARED if not same(old[name], new[name])}


def same(old: Any, new: Any) -> bool:
    """Equal, numbers with a fraction within the tolerance."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(same(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    if isinstance(old, float) or isinstance(new, float):
        numbers = isinstance(old, int | float) and isinstance(new, int | float)
        return numbers and math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(old == new)


def _made(bench: Bench, scratch: Path, chosen: Sequence[Json]) -> dict[Name, Json]:
    """The chosen records, made again."""
    store: Store[Planned] = Store(scratch)
    runner = bench.runner(store)
    wanted = {_name(record) for record in chosen}
    planned: list[Planned] = []
    for seed in sorted({record["seed"] for record in chosen}):
        ids = {record["example_id"] for record in chosen if record["seed"] == seed}
        examples = [example for example in bench.examples(seed) if example.id in ids]
        found = runner.pending(examples, bench.arms, seed)
        planned += [one for one in found if (seed, one.example.id, _spelled(one.arm)) in wanted]
    bench.run(store, runner, planned)
    store.close()
    return {_name(record): record for record in store.records()}


def _name(record: Mapping[str, Any]) -> Name:
    return record["seed"], record["example_id"], _arm_of(record)


def _arm_of(record: Mapping[str, Any]) -> str:
    return json.dumps([record["stack"], record["point"], record["stack_config"]], sort_keys=True)


def _spelled(arm: Arm) -> str:
    """`_arm_of` the arm's records; a calibrated one's configuration names the table that its records name."""
    return json.dumps([arm.label, arm.point, arm.config], sort_keys=True)


def _arm(record: Mapping[str, Any], build: Builder) -> Arm:
    stack = build(record["stack_config"], f"stack {record['stack']!r}")
    return Arm(record["stack"], record["point"], record["stack_config"], stack)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where all are equal, 1 where any differs, 2 with one line on what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m harness.verify", description="Make a sample of records again and compare.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, such as results/<run_id>")
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help=f"records to make again ({SAMPLE})")
    parser.add_argument("--allow", action="append", default=[], metavar="MODULE", help=ALLOW)
    options = parser.parse_args(arguments)
    try:
        found = verify(options.run, options.sample, options.allow)
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    for line in found.different:
        print(printable(line))
    if found.answers:
        print(f"{found.answers} of them in the answer alone. {BATCH}")
    if found.other_version:
        print(f"{found.other_version} of them were {ANOTHER}")
    print(f"{found.checked - len(found.different)} equal, {len(found.different)} differing")
    return 1 if found.different else 0


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
