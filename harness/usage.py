"""The page that `python -m harness --help` prints: what it does, commands, the groups of conf/ and their members."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness.errors import UserError
from harness.files.paths import CONF, user_path
from harness.files.plain_files import printable

WIDTH = 100
FLAGS = ("-h", "--help")
ABOUT = (
    "Measures what each byte of KV cache buys: runs a task under the full cache and under compressed ones, and draws quality "
    "against the bytes that the caches really hold. One command composes a model, stacks of compression and a task; the last "
    "printed line is the run's folder, whose dashboard.html shows the frontier."
)
COMMANDS = (
    ("python -m harness", "the default model, task and list of stacks"),
    ("python -m harness task=docqa 'stacks=[int8,h2o,snapkv]' limit=20", "several stacks on another task, 20 examples"),
    ("python -m harness compress=snapkv compress.keep.recent=64", "one stack with a setting changed, at all of its budgets"),
    ("python -m harness -m seed=0,1,2 compress=int8,h2o", "a sweep; hydra/launcher=slurm sends it to a cluster"),
    ("python -m harness.report results/RUN... --out page.html", "runs as one table and one page"),
    ("python -m harness.recommend results/RUN --max-loss 0.02", "the smallest cache with a guaranteed loss; --budget 2GiB"),
    ("python -m harness.speed compress=int8 seq=1024", "time to first token and tokens a second, each stack by itself"),
    ("python -m harness.plan model=llama3_8b compress=int8 seq=32768", "KV bytes and what fits where; nothing is loaded"),
)
CHOICES = {
    "model": "what is evaluated",
    "task": "what it is asked, and how that is scored",
    "corpus": "the text that tasks are made of",
    "compress": "a stack: what is done to the cache",
    "dimensions": "a well-known model, for python -m harness.plan model=NAME alone",
    "experiment": "a list of stacks, with the settings it is made for",
}
PARTS = {
    "keep": ("keep@compress.keep=", "which tokens stay"),
    "merge": ("merge@compress.merge=", "what becomes of tokens that go"),
    "layers": ("layers@compress.keep.layers=", "how a budget is split over layers"),
    "heads": ("heads@compress.keep.heads=", "how it is split over KV heads"),
    "share": ("share@compress.share=", "which layers and KV heads share a store"),
    "codec": ("codec@compress.keys= and codec@compress.values=", "how they are stored"),
}
LAUNCHER = ("hydra/launcher", "where the jobs of a sweep run (default: one after another in this process)")
MORE = (
    ("conf/README.md", "stacks, points, changing parts, an own folder, clusters"),
    ("tasks/README.md", "tasks and their scores"),
    ("results/README.md", "the fields of a record"),
    ("python -m harness.status DIR", "how far runs are"),
    ("python -m harness.verify RUN", "makes records again and compares them"),
    ("python -m harness.families", "which model families are measured rightly, and why others are not"),
    ("python -m harness --cfg job", "every key with its value; it runs nothing"),
    ("python -m harness --hydra-help", "the flags of Hydra, which reads the command line"),
)


def asked(arguments: Sequence[str]) -> bool:
    """Whether the arguments ask for this page."""
    return any(argument in FLAGS for argument in arguments)


def answered(run: Callable[[Sequence[str]], int], own_page: str, arguments: Sequence[str] | None = None) -> int:
    """A command that takes overrides, run with these arguments or those of the process: its page where that is asked for.

    Returns:
        Its exit code, or 2 with one line on what is wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if asked(given):
        print(own_page)
        return 0
    try:
        return run(given)
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2


def page(arguments: Sequence[str] = ()) -> str:
    """The page, at most 100 columns wide; members of a folder that --config-dir names are on it too."""
    folders = [CONF, *_own(arguments)]
    lines = [*textwrap.wrap(ABOUT, WIDTH), "", "Usage: python -m harness [GROUP=NAME | KEY=VALUE]...", ""]
    for command, words in COMMANDS:
        lines += [f"  {command}", f"      {words}"]
    lines += ["", "Groups, GROUP=NAME:"]
    for group, words in CHOICES.items():
        lines += _group(f"{group}: {words}", members(group, folders))
    lines += ["", "Parts of a stack, which is chosen by compress=NAME:"]
    for group, (key, words) in PARTS.items():
        lines += _group(f"{key}  {words}", members(group, folders))
    lines += ["", *_group(f"{LAUNCHER[0]}: {LAUNCHER[1]}", members(LAUNCHER[0], folders)), "", "More:"]
    wide = max(len(name) for name, _ in MORE)
    lines += [f"  {name:{wide}}  {words}" for name, words in MORE]
    return "\n".join(lines)


def members(group: str, folders: Sequence[Path]) -> list[str]:
    """The names in a group, sorted, over all configuration folders."""
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})


def _own(arguments: Sequence[str]) -> Iterator[Path]:
    """The folders that the arguments name with --config-dir or -cd."""
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, given = flag.partition("=")
        if name in ("--config-dir", "-cd"):
            yield user_path(given if equals else value)


def _group(title: str, names: Sequence[str]) -> list[str]:
    indent = " " * 6
    return [
        f"  {title}",
        *textwrap.wrap(", ".join(names), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False),
    ]
