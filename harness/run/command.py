"""What `python -m harness` does between the configuration and the printed folder; it knows no stage and no task."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness.kv.attention import NAME
from harness.kv.compat import shape_of
from harness.lm.calibrate import ROLES, calibrated
from harness.lm.engine import Engine
from harness.lm.load import LM, ModelSpec, load
from harness.lm.waves import parse_bytes
from harness.run import identity
from harness.run.cells import Cell, build, cells, is_stack_override, key_of
from harness.run.lm_eval_runner import LmEvalRunner
from harness.run.pareto import rank
from harness.run.points import points
from harness.run.recorder import Setup
from harness.run.report import write_all
from harness.run.runner import Runner
from harness.run.store import Store
from harness.run.stream_runner import StreamRunner
from harness.run.table import show
from harness.types import Example, Task, Tokens, UserError, require

RUNNERS: dict[str, Any] = {"question": Runner, "stream": StreamRunner, "lm_eval": LmEvalRunner}
NOT_IDENTITY = ("compress", "stacks", "limit", "results_dir", "memory_limit", "progress")


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse, before Hydra reads them, the two spellings of several stacks that it would merge or not understand."""
    sweeps = any(a in ("-m", "--multirun") for a in arguments)
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
            several = f"stacks=[{value}]" if key == "compress" else f"-m {argument}"
            raise UserError(f"{argument} has a comma, which asks for several runs: use {several}, or quote the value")


def execute(cfg: DictConfig, overrides: Sequence[str]) -> tuple[Path, int]:
    """Run one configuration; returns (run folder, failed records). UserError before any model loads where possible."""
    _quiet()
    found = cells(cfg, overrides)
    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    limit = config["limit"]
    require(limit is None or (isinstance(limit, int) and limit > 0), "limit", limit, "a positive number of examples or null")
    seed = config["seed"]
    require(isinstance(seed, int) and not isinstance(seed, bool), "seed", seed, "a whole number")
    memory = parse_bytes("memory_limit", config["memory_limit"])
    spec: ModelSpec = build(config["model"], "model")
    task: Task = build(config["task"], "task")
    corpus = build(config["corpus"], "corpus") if getattr(task, "needs_corpus", True) else None
    spec.check()
    _check_heads(found, spec)
    _check_calibration(found)

    lm = load(spec, NAME)
    engine = Engine(lm.model, lm.kv_dtype, lm.eos_ids)
    found = [_calibrated(cell, engine, lm) for cell in found]
    examples = _examples(task, lm.tokens, corpus, config, limit)
    run = identity.run_id(spec.name, task.name, {k: v for k, v in config.items() if k not in NOT_IDENTITY})
    store = Store(Path(config["results_dir"]) / run)
    about_corpus = {} if corpus is None else {"name": corpus.name, "licence": corpus.licence, "sha256": corpus.digest}
    manifest = identity.manifest(config, lm.identity, about_corpus, [cell.name for cell in found])
    store.write_manifest(manifest)
    keyed = {"model": dict(lm.identity), "code": manifest["code_sha256"], "versions": identity.versions()}
    setup = Setup(
        run_id=run,
        model=spec.name,
        identity=keyed,
        seed=config["seed"],
        memory_limit=memory,
        attn=NAME,
        kv_dtype=spec.kv_dtype,
        shape=engine.shape,
        progress=config["progress"],
    )
    failures = RUNNERS[getattr(task, "runner", "question")](lm, engine, task, store, setup).run(examples, found)
    write_all(store.folder, manifest)
    _show(store)
    return store.folder, len(failures)


def _show(store: Store) -> None:
    """The table of what was asked for; the folder's page holds all of its records."""
    records = store.records()
    asked = [record for record in records if record["key"] in store.asked]
    show(rank(points(asked)))
    if len(asked) < len(records):
        print(f"{len(records) - len(asked)} more records of this run are in its points.csv and dashboard.html")


def _examples(task: Task, tokens: Tokens, corpus: Any, config: dict[str, Any], limit: int | None) -> list[Example]:
    examples = list(task.examples(tokens, corpus, config["seed"]))
    if not examples:
        raise UserError(f"task={task.name} has no examples")
    doubled = [name for name, times in Counter(e.id for e in examples).items() if times > 1]
    if doubled:
        raise UserError(f"task={task.name} gives several examples the id {doubled[0]!r}: every example needs its own")
    return examples[:limit]


def _check_heads(found: Sequence[Cell], spec: ModelSpec) -> None:
    """Group sizes against head dims, from the model's config alone."""
    shape = shape_of(spec.config())
    for cell in found:
        for layer in {(layer.d_key, layer.d_value) for layer in shape.layers}:
            for role, codec, dim in (("keys", cell.stack.keys, layer[0]), ("values", cell.stack.values, layer[1])):
                try:
                    codec.check(dim)
                except UserError as error:
                    raise UserError(f"stack {cell.label!r}, {role}: {error}") from None


def _check_calibration(found: Sequence[Cell]) -> None:
    """Calibration text that cannot be had ends the run before the model loads."""
    for cell in found:
        for wanted in (cell.stack.keys.calibration, cell.stack.values.calibration):
            if wanted is not None:
                wanted.corpus.documents()


def _calibrated(cell: Cell, engine: Engine, lm: LM) -> Cell:
    """A cell whose codecs have their limits; the digest of their table joins its configuration, and so the record's key."""
    stack = calibrated(cell.stack, engine, lm)
    if stack is cell.stack:
        return cell
    config = copy.deepcopy(cell.config)
    for role in ROLES:
        about: Any = getattr(stack, role).info().get("calibration")
        if about and config[role].get("calibration"):
            config[role]["calibration"]["table"] = about["table"]
    return replace(cell, stack=stack, config=config)


def _quiet() -> None:
    """Libraries' notes do not belong between a progress bar and a table."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")
