"""The command `python -m harness.plan`: KV bytes of a model under stacks, and what fits where, without weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from harness.configure.arms import FULL, arms_of
from harness.configure.compose import compose
from harness.configure.overrides import key_of, single
from harness.configure.typed import build
from harness.files.pipes import end_with_reader
from harness.files.plain_files import printable
from harness.models.load import DTYPES, ModelSpec
from harness.planning.architecture import Architecture, known, named, of_config
from harness.planning.asked import WEIGHTS, Asked, divided
from harness.planning.gpus import GPUS
from harness.planning.plan_page import write
from harness.planning.plan_tables import show
from harness.planning.planned_sizes import Plan, Planner
from harness.usage import answered

USAGE = f"""python -m harness.plan [model=NAME] [compress=NAME | stacks=[a,b]] [KEY=VALUE]...

KV bytes of a model under stacks of compression, exact or as bounds, and what fits on accelerators. No weights are read.

  python -m harness.plan model=llama3_8b compress=sink_h2o_int8 seq=32768 batch=8
  python -m harness.plan model=llama2_70b 'stacks=[int8,kivi2,snapkv]' 'seq=[4096,32768]' gpu=[h100_80gb,h200] gpus=2
  python -m harness.plan model=local model.path=DIR compress=int4 out=plan.html

Keys: seq, batch (tokens and sequences, lists too), new (answer tokens), page (tokens an engine allocates at a time), gpu,
gpus (how many hold one model), utilization (share of the memory), weights ({", ".join(WEIGHTS)}), out (a page and a CSV)
Accelerators: {", ".join(GPUS)}
Models with dimensions in conf/dimensions: {", ".join(known())}
Any other model=... is read from its transformers config."""


def plan(overrides: Sequence[str]) -> tuple[Architecture, Asked, Plan]:
    """The plan of a command line. UserError for what is not possible."""
    asked, rest = divided(overrides)
    model, rest = _without_named(rest)
    cfg = compose(rest)
    arms = arms_of(cfg, rest)
    spec = build(cfg.model, "model")
    assert isinstance(spec, ModelSpec)
    architecture = named(model) if model else _configured(spec)
    given = any(key_of(one) == "model.dtype" for one in rest)
    weight = 2.0 if model and not given else float(DTYPES[spec.dtype].itemsize)  # checkpoints are of 16 bits, as served
    planner = Planner(model=architecture, itemsize=DTYPES[spec.kv_dtype].itemsize, weight=weight)
    return architecture, asked, planner.plan(arms, asked)


def _without_named(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the model, if its dimensions are on file; the overrides that are left to compose)."""
    chosen = [one for one in overrides if key_of(one) == "model"]
    name = single(chosen[-1]) if chosen else None
    if name not in known():
        return None, list(overrides)
    return str(name), [one for one in overrides if key_of(one) != "model"]


def _configured(spec: ModelSpec) -> Architecture:
    spec.check()
    return of_config(spec.name, spec.config(), f"the transformers config of {spec.name}", DTYPES[spec.dtype])


def lines(model: Architecture, found: Plan) -> Iterator[str]:
    """What is said below the tables."""
    yield f"dimensions: {model.source}; {model.parameters:,} parameters"
    yield from (f"not possible: {line}" for line in found.refused)
    yield from (f"caution: {line}" for line in found.cautions)


def run(overrides: Sequence[str]) -> int:
    """Plan, write what was asked for, and print; 1 where no stack but the full cache is possible, although some were asked for.

    UserError for what is not possible.
    """
    model, asked, found = plan(overrides)
    said = list(lines(model, found))
    if page := asked.page_file:
        write(page, found.sizes, found.fits, said)
    show(found.sizes, found.fits)
    for line in [*said, *([str(page)] if page else [])]:
        print(printable(line))
    return int(bool(found.refused) and set(found.sizes["stack"]) <= {FULL})


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 where nothing that was asked for is possible, or 2 with one line on what is wrong."""
    return answered(run, USAGE, arguments)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
