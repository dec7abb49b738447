"""The command `python -m harness.speed`: how fast one sequence is read and decoded under each stack, each run by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from harness.configure.arguments import check_arguments
from harness.configure.arms import FULL, Arm, arms_of
from harness.configure.compose import compose
from harness.configure.options import Options
from harness.configure.overrides import own_keys, single
from harness.configure.typed import build
from harness.engine.engine import Engine
from harness.errors import require
from harness.evaluation.assemble import calibrated_arm
from harness.files.paths import page_path
from harness.files.pipes import end_with_reader
from harness.files.plain_files import printable
from harness.kv.attention import NAME
from harness.models.load import LM, ModelSpec, load
from harness.timing.measured import Prompt, Stopwatch, Timed
from harness.timing.speed_page import show, write
from harness.timing.speeds import speeds
from harness.usage import answered

USAGE = """python -m harness.speed [model=NAME] [compress=NAME | stacks=[a,b]] [KEY=VALUE]...

Time to the first token, tokens a second, and bytes that work takes beside the cache, of every stack by itself: one sequence,
nothing shared. Medians of repeats after warm-up, in turn. It is the speed of this evaluator on this machine, not of a server.

  python -m harness.speed 'stacks=[int8,kivi2,snapkv]' seq=1024 new=32 repeats=5
  python -m harness.speed model=hub model.repo=ORG/NAME compress=int4 seq=32768 out=speed.html

Keys: seq (tokens of the prompt), new (tokens of the answer), repeats, warm_up, out (a page and a CSV)"""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The keys that are not a run's.

    Attributes:
        seq: tokens of the prompt; the last one is held back until the cache is compressed.
        new: tokens of the answer; no end token stops it.
        repeats: that count.
        warm_up: repeats before them, which do not.
        out: page to write; a table of the same name beside it.
    """

    seq: int = 1024
    new: int = 32
    repeats: int = 5
    warm_up: int = 1
    out: str = ""

    def __post_init__(self) -> None:
        for key, least in (("seq", 2), ("new", 2), ("repeats", 1), ("warm_up", 0)):
            value = getattr(self, key)
            require(type(value) is int and least <= value < 1 << 30, key, value, f"a whole number, {least} or more")
        require(isinstance(self.out, str), "out", self.out, "a file to write")
        page = self.page_file
        require(page is None or page.parent.is_dir(), "out", self.out, "a file in a folder that is there")

    @property
    def page_file(self) -> Path | None:
        """Where the page goes; None for none."""
        return page_path("out", self.out, (".csv",)) if self.out else None


READ = ("model", "corpus", "compress", "stacks", "experiment", "batch_invariant")  # of a run


def divided(overrides: Sequence[str]) -> tuple[Asked, list[str]]:
    """(the own keys of this command, the overrides of a run that are left). UserError for what is not possible."""
    own, rest = own_keys(overrides, Asked.__dataclass_fields__, READ)
    check_arguments(rest)
    return Asked(**{key: single(text) for key, text in own.items()}), rest


def prompt_of(lm: LM, cfg: DictConfig, asked: Asked) -> Prompt:
    """The first tokens of the corpus, as the model expects a text. UserError where there are too few, or positions for them."""
    need = asked.seq + asked.new
    most = lm.tokens.max_length
    require(most is None or need <= most, "seq", asked.seq, f"with the answer {need} positions, the model has {most}")
    ids = list(lm.tokens.bos_ids)
    for document in build(cfg.corpus, "corpus").documents():  # type: ignore[attr-defined]
        if len(ids) >= asked.seq:
            break
        ids += lm.tokens.encode(document[: 8 * asked.seq])
    require(len(ids) >= asked.seq, "seq", asked.seq, f"the corpus has {len(ids)} tokens")
    return Prompt(tuple(ids[: asked.seq]), asked.new)


def run(overrides: Sequence[str]) -> int:
    """Measure, write what was asked for, and print; 1 where no stack but the full cache ran, although some were asked for.

    UserError for what is not possible.
    """
    asked, rest = divided(overrides)
    cfg = compose(rest)
    arms = arms_of(cfg, rest)
    options = Options.of(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    spec = build(cfg.model, "model")
    assert isinstance(spec, ModelSpec)
    spec.check()
    lm = load(spec, NAME)
    engine = Engine(lm.model, lm.kv_dtype, invariant=options.batch_invariant)
    prompt = prompt_of(lm, cfg, asked)
    ready = [calibrated_arm(arm, engine, lm) for arm in arms]
    why = {arm.name: arm.refusal or (arm.failure[0] if arm.failure else "") for arm in ready}
    cannot = {name: Timed(error=said) for name, said in why.items() if said}
    stacks = {arm.name: arm.stack for arm in ready if arm.name not in cannot}
    found = cannot | Stopwatch(engine, prompt).measure(stacks, repeats=asked.repeats, warm_up=asked.warm_up)
    _said(arms, asked, spec, engine, found=speeds(arms, found))
    wanted = [one for name, one in found.items() if name != FULL]
    return int(bool(wanted) and all(one.error for one in wanted))


def _said(arms: Sequence[Arm], asked: Asked, spec: ModelSpec, engine: Engine, *, found: Any) -> None:
    place = f"{engine.device.type}, {torch.get_num_threads()} threads" if engine.device.type == "cpu" else str(engine.device)
    title = f"Speed of {spec.name}: 1 x {asked.seq:,} tokens, {asked.new} new"
    how = (
        f"Median of {asked.repeats} repeats after {asked.warm_up} to warm up, {len(arms)} arms in turn, each alone; {place}, "
        f"{spec.dtype}, batch_invariant={str(engine.invariant).lower()}. Ratios are of the same repeat."
    )
    what = "Speed of this evaluator, which decodes stored codes in torch; a serving engine has kernels for that."
    if page := asked.page_file:
        write(page, found, title, (how, what))
    show(found, title)
    for line in (how, what, *([str(page)] if page else [])):
        print(printable(line))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 where nothing that was asked for ran, or 2 with one line on what is wrong."""
    return answered(run, USAGE, arguments)


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
