"""From a resolved configuration to a loaded model, its task, its examples and a runner; nothing runs yet."""

from __future__ import annotations

import copy
import os
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.calibrate.calibration_text import ROLES
from harness.calibrate.codec_limits import calibrated
from harness.configure import typed
from harness.configure.arms import Arm
from harness.configure.kinds import of_kind
from harness.configure.options import Options
from harness.engine.batches import one_line
from harness.engine.engine import Engine
from harness.engine.scheduler import Scheduler
from harness.engine.time_limit import TimedEngine
from harness.errors import UnfitStackError, UserError, require
from harness.evaluation.evaluate import Runner, evaluate
from harness.evaluation.lm_eval_runner import LmEvalRunner
from harness.evaluation.planned import Planned, Setup, samples_of
from harness.evaluation.process import reproducible
from harness.evaluation.question_runner import QuestionRunner
from harness.evaluation.record_maker import RecordMaker
from harness.evaluation.recorder import Recorder
from harness.evaluation.stream_runner import StreamRunner
from harness.files.json_values import Config, Json
from harness.files.paths import user_path
from harness.kv.attention import NAME
from harness.kv.compat import shape_of
from harness.kv.shared.stored_shape import stored_dims
from harness.models.load import LM, ModelSpec, load, outline
from harness.records import keys as identity
from harness.records.store import Store
from harness.types import Corpus, Example, Task
from tasks.lm_eval_task import LmEval
from tasks.stream import Stream

NOT_IDENTITY = "compress stacks limit precision results_dir memory_limit progress redo time_limit decoded_views".split()
# From the configuration of a model, a task, ... and its name, which a refusal starts with:
Build = Callable[[object, str], object]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything that makes records, ready."""

    config: Config
    options: Options
    lm: LM
    engine: Engine
    task: Task
    corpus: Corpus | None
    setup: Setup
    arms: tuple[Arm, ...]  # their codecs calibrated
    drawn: dict[int, list[Example]] = field(default_factory=dict)  # of every seed asked for, drawn once

    def runner(self, store: Store[Planned]) -> Runner:
        """What this kind of task adds to the loop."""
        kind, task = _kind(self.task), self.task
        if kind == "question":
            return QuestionRunner(self.lm, task, self.setup)
        if isinstance(task, Stream):
            return StreamRunner(self.lm, task, self.setup, store)
        if isinstance(task, LmEval):
            return LmEvalRunner(self.lm, task, self.setup, store)
        raise UserError(f"task._target_={type(task).__name__} is not possible: runner={kind} is for tasks derived from ours")

    def run(self, store: Store[Planned], runner: Runner, planned: Sequence[Planned]) -> list[str]:
        """Make what is missing of these records, a line for each failure."""
        scheduler = Scheduler(self.engine, self.setup.memory_limit, views=self.setup.views)
        return evaluate(runner, scheduler, self.recorder(store, planned))

    def recorder(self, store: Store[Planned], planned: Sequence[Planned]) -> Recorder:
        """What writes these records."""
        return Recorder(RecordMaker(self.task, self.setup), store, planned)

    def planned(self, runner: Runner) -> list[Planned]:
        """All records asked for. A prompt that several seeds give is asked once.

        Raises:
            UserError: no examples, several with one id, a seed that changes nothing.
        """
        found: list[Planned] = []
        prompts: set[str] = set()
        for seed in self.options.seeds:
            examples = self.examples(seed)[: self.options.limit]
            planned = runner.pending(examples, self.arms, seed)
            new = [one for one in planned if one.prompt.sha256 not in prompts] if prompts else planned
            if not new:
                raise UserError(f"seed={seed} gives no new examples: task={self.task.name} asks the same whatever the seed")
            prompts |= {one.prompt.sha256 for one in planned}
            found += new
        return found

    def examples(self, seed: int) -> list[Example]:
        """All examples of a seed; UserError where there is none, or two have one id."""
        if seed in self.drawn:
            return self.drawn[seed]
        examples = list(self.task.examples(self.lm.tokens, self.corpus, seed))
        if not examples:
            raise UserError(f"task={self.task.name} has no examples")
        doubled = [name for name, times in Counter(e.id for e in examples).items() if times > 1]
        if doubled:
            raise UserError(f"task={self.task.name} gives several examples the id {doubled[0]!r}: every example needs its own")
        self.drawn[seed] = examples
        return examples

    def manifest(self, arms: Sequence[Arm]) -> Json:
        """What an invocation was, and the digests of all examples there are, whatever the limit."""
        corpus = self.corpus
        about = {} if corpus is None else {"name": corpus.name, "licence": corpus.licence, "sha256": corpus.digest}
        known = identity.manifest(self.config, self.lm.identity, about, [arm.name for arm in arms])
        return known | {"samples": samples_of(self.setup.identity, {seed: self.examples(seed) for seed in self.options.seeds})}


def assemble(config: Config, arms: Sequence[Arm], *, weights: bool = True, build: Build = typed.build) -> Bench:
    """Build and load everything a configuration names; UserError before any model loads where possible.

    Without weights the bench knows every record it would make, and can make none. `build` makes what is named: by default
    whatever they name, which is for configurations that the user typed; of a run folder `trusted.Builder`.
    """
    options, spec, task = outlined(config, build)
    needed = getattr(task, "needs_corpus", True)
    corpus = of_kind(build(config["corpus"], "corpus"), Corpus, "corpus") if needed else None  # type: ignore[type-abstract]
    if weights:
        spec.check()
    _check_heads(arms, spec)
    _check_calibration(arms)
    reproducible(options.seeds[0])

    lm = load(spec, NAME) if weights else outline(spec, NAME)
    engine = (
        Engine(lm.model, lm.kv_dtype, lm.eos_ids, invariant=options.batch_invariant)
        if options.time_limit is None
        else TimedEngine(lm.model, lm.kv_dtype, lm.eos_ids, options.time_limit, invariant=options.batch_invariant)
    )
    shared = {k: v for k, v in config.items() if k not in ("compress", "stacks")}  # a stack's own code is in its arms' digests
    setup = Setup(
        run_id=run_id(spec, task, config),
        model=spec.name,
        identity={
            "model": dict(lm.identity),
            "task": config["task"],
            "batch_invariant": options.batch_invariant,
            "code": identity.code_hash(shared),
            "versions": identity.versions(),
        },
        memory_limit=options.memory_limit,
        attn=NAME,
        kv_dtype=spec.kv_dtype,
        shape=engine.shape,
        progress=options.progress,
        views=options.decoded_views == "auto",
        batch_invariant=engine.invariant,
        adaptive=options.auto,
    )
    ready = tuple(calibrated_arm(arm, engine, lm) for arm in arms)
    return Bench(config=config, options=options, lm=lm, engine=engine, task=task, corpus=corpus, setup=setup, arms=ready)


def _check_calibration(arms: Sequence[Arm]) -> None:
    """Calibration text that cannot be had ends the run before the model loads."""
    for wanted in (one for arm in arms for one in arm.stack.calibrations):
        wanted.corpus.documents()


def calibrated_arm(arm: Arm, engine: Engine, lm: LM) -> Arm:
    """An arm whose codecs have their limits; the digest of their table joins its configuration, and so the record's key.

    Where measuring them fails, for want of time or memory, its records fail, and where the model does not allow the stack they
    are refused: no other's. UserError for what concerns the whole run, such as a cache that cannot be written.
    """
    try:
        stack = calibrated(arm.stack, engine, lm)
    except UnfitStackError as error:
        return replace(arm, refusal=str(error))
    except UserError:
        raise
    except Exception as error:
        return replace(arm, failure=(f"calibration: {one_line(error)}", traceback.format_exc()))
    if stack is arm.stack:
        return arm
    config = copy.deepcopy(arm.config)
    for role in (*ROLES, "share"):
        about = (part := getattr(stack, role)) and part.info().get("calibration")
        if isinstance(about, Mapping) and config[role].get("calibration"):
            config[role]["calibration"]["table"] = about["table"]
    return replace(arm, stack=stack, config=config)


def outlined(config: Config, build: Build = typed.build) -> tuple[Options, ModelSpec, Task]:
    """What a configuration says of everything but its stacks, checked; nothing is loaded (UserError)."""
    options = Options.of(config)
    spec = of_kind(build(config["model"], "model"), ModelSpec, "model")
    task = of_kind(build(config["task"], "task"), Task, "task")  # type: ignore[type-abstract]
    one = len(options.seeds) == 1 or _kind(task) != "lm_eval"
    require(one, "seed", list(options.seeds), "task=lm_eval takes one seed a run")
    return options, spec, task


def run_folder(config: Config) -> Path:
    """Where a configuration's records go; all of it but the stacks is checked, nothing is loaded (UserError)."""
    _, spec, task = outlined(config)
    folder = results_folder(config) / run_id(spec, task, config)
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    fits = above.is_dir() and os.access(above, os.W_OK)
    require(fits, "results_dir", config["results_dir"], f"{above} is not a folder that can be written")
    return folder


def results_folder(config: Config) -> Path:
    """Where all runs go."""
    return user_path(config["results_dir"])


def run_id(spec: ModelSpec, task: Task, config: Config) -> str:
    """The name of the run folder of a configuration."""
    return identity.run_id(spec.name, task.name, {k: v for k, v in config.items() if k not in NOT_IDENTITY})


def _kind(task: Task) -> str:
    """question, stream or lm_eval."""
    return str(getattr(task, "runner", "question"))


def _check_heads(found: Sequence[Arm], spec: ModelSpec) -> None:
    """Group sizes against the head dims of layers that stacks compress, from the model's config alone."""
    shape = shape_of(spec.config())
    for arm, (d_key, d_value) in ((one, dims) for one in found for dims in stored_dims(one.stack.share, shape)):
        for role, codec, dim in (("keys", arm.stack.keys, d_key), ("values", arm.stack.values, d_value)):
            try:
                codec.check(dim)
            except UserError as error:
                raise UserError(f"stack {arm.label!r}, {role}: {error}") from None
