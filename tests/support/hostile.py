"""A run folder as somebody who means harm would hand it on: everything in it is readable, and nothing in it may be obeyed.

`build(place)` makes the folder and, beside it, what must stay as it is; `untouched(place)` says what did not. A trap is code
that leaves the file `place/ran` when it runs. For tests of every command that reads a run folder, pages included.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

from tests.support.record_factory import make

RUN = "hostile-needle-0a1b2c3d"
MARKUP = (
    "[/x]",
    "[bold]b[/bold]",
    "<img src=x onerror=window.PWNED=1>",
    "</script><script>window.PWNED=1</script>",
    "a/../../b",
)
CONTROL = "\x1b[2J\x07line\nbreak"
STAMP = "2026-01-01T00:00:00.000000+00:00"
UNFIT: dict[str, Any] = {  # values that no record has, field by field
    "n_prompt": None, "weight": "1", "chance": None, "kv_bytes_context": 10**400, "tokens_seen": -1, "entries_touched": -(10**30),
    "written_at": "2026-01-01T00:00:00", "seed": 1.5, "metrics": {"strict": "x"}, "bytes": {"allocated": {"payload": -1}},
    "attempt": 10**18, "score": [1], "status": "fine", "aggregate": "max", "stack": None, "writer": "../../../victim",
    "series_path": "../outside/series.parquet", "point": {"keep.budget.value": 10**400}, "gold": "x", "timings": {"s": {}},
}  # fmt: skip


class Trap:
    """Unpickling one runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.mark}'",)


def traps(place: Path) -> dict[str, dict[str, Any]]:
    """Targets that would run code, by a name for messages."""
    mark, pickled = str(place / "ran"), str(place / "outside" / "trap.pkl")
    write = {"_args_": [mark, "x"]}
    return {
        "pickle": {"_target_": "pandas.read_pickle", "_args_": [pickled]},
        "torch": {"_target_": "torch.load", "_args_": [pickled], "weights_only": False},
        "joblib": {"_target_": "joblib.load", "_args_": [pickled]},
        "path": {"_target_": "pathlib.Path.write_text", **write},
        "through us": {"_target_": "harness.files.package_data.os.system", "_args_": [f"touch '{mark}'"]},
        "through a stage": {"_target_": "harness.stages.keep.torch.load", "_args_": [pickled], "weights_only": False},
        "a function of ours": {"_target_": "harness.records.atomic.replace", **write},
        "a function of a stage": {
            "_target_": "harness.stages.heads.head_list.head_list",
            "key": "k",
            "heads": None,
            "file": mark,
        },
        "partial": {"_target_": "harness.stages.codec.int8.Int8", "_partial_": True},
        "arguments": {"_target_": "harness.stages.codec.int8.Int8", "_args_": ["x"]},
        "not recursive": {"_target_": "harness.stages.codec.int8.Int8", "_recursive_": False},
        "nested": {
            "_target_": "harness.stages.codec.int8.Int8",
            "name": {"_target_": "os.system", "_args_": [f"touch '{mark}'"]},
        },
        "in a list": {"_target_": "harness.stages.codec.int8.Int8", "name": [{"_target_": "os.system", "_args_": ["true"]}]},
        "a module of theirs": {"_target_": "theirs.Trap"},
        "another slot": {"_target_": "harness.stages.budget.Amount", "unit": "tokens", "value": 4},
        "no name": {"_target_": 3},
    }


def stack_config(keys: Any = None) -> dict[str, Any]:
    """A stack as records have it; `keys` takes the place of its codec of keys."""
    plain = {"_target_": "harness.stages.codec.int8.Int8"}
    return {
        "_target_": "harness.stages.stack.Stack",
        "keys": plain if keys is None else keys,
        "values": plain,
        "phase": "prefill",
    }


def model_directory(place: Path) -> Path:
    """A model directory whose configuration, tokenizer and weights all bring code along."""
    folder = place / "model"
    folder.mkdir()
    auto = {
        "AutoConfig": "trap.TrapConfig",
        "AutoModelForCausalLM": "trap.TrapModel",
        "AutoTokenizer": ["trap.TrapTokenizer", None],
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "trap", "auto_map": auto, "architectures": ["TrapModel"]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TrapTokenizer", "auto_map": auto}))
    (folder / "trap.py").write_text(f"from pathlib import Path\nPath({str(place / 'ran')!r}).touch()\n")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(place / "ran"), protocol=2))
    return folder


def manifest(**changes: Any) -> dict[str, Any]:
    """A manifest as our invocations write it."""
    config: dict[str, Any] = {
        "model": {"_target_": "harness.models.load.ModelSpec", "name": "tiny", "source": "random", "tokenizer": "bytes",
                  "random": {"_target_": "harness.models.random_model.RandomModel"}},
        "corpus": {"_target_": "tasks.corpus.StandardLibrary", "name": "stdlib", "licence": "PSF"},
        "task": {"_target_": "tasks.needle.Needle", "lengths": [300]},
        "seed": 0, "limit": None, "memory_limit": "4GiB", "results_dir": "results", "progress": False, "time_limit": None,
    }  # fmt: skip
    return {"time": STAMP, "writer": "host-1-abcdef", "versions": {}, "config": config | changes.pop("config", {}), **changes}


def records() -> list[dict[str, Any]]:
    """Records that read well and whose names are meant to be obeyed by a terminal, a page or a shell."""
    names = [*MARKUP, CONTROL]
    config = stack_config()
    found = [make(key="good", run_id=RUN, stack_config=config, written_at=STAMP)]
    found += [
        make(
            key=f"k{at}",
            run_id=RUN,
            stack=name,
            model="[/x]",
            example_id="1024-0.5-0",
            stack_config=config,
            error=name,
            written_at=STAMP,
        )
        for at, name in enumerate(names)
    ]
    return found


def build(place: Path, *, links_to_folders: bool = False) -> Path:
    """The run folder `place/results/RUN`; with `links_to_folders` its own folders are links to `place/outside`."""
    outside, run = place / "outside", place / "results" / RUN
    outside.mkdir(parents=True)
    run.mkdir(parents=True)
    (outside / "notes.jsonl").write_text('{"mine": 1}\n{"key": "half a li')
    (outside / "victim.lock").write_text("mine")
    (outside / "series.parquet").write_text("mine")
    (outside / "points.csv").write_text("mine")
    (outside / "trap.pkl").write_bytes(pickle.dumps(Trap(place / "ran"), protocol=2))
    (place / "victim.lock").write_text("mine")
    (place / "theirs.py").write_text(f"from pathlib import Path\nPath({str(place / 'ran')!r}).touch()\nclass Trap: pass\n")
    model_directory(place)
    shutil.copytree(outside, place / "before")
    if links_to_folders:
        for name in ("manifests", "claims", "failures", "series"):
            (run / name).symlink_to(outside)
    else:
        _folders(run, outside)
    _shards(run, outside)
    (run / "points.csv").symlink_to(outside / "points.csv")
    return run


def _folders(run: Path, outside: Path) -> None:
    (run / "manifests").mkdir()
    told = {"20260101T000000Z-a": manifest(writer="../../../../victim"), "20260102T000000Z-b": manifest()}
    told["20260103T000000Z-c"] = manifest(time="2026-01-01")
    told["20260104T000000Z-d"] = manifest(asked={"arms": [[{}, []]], "examples": [[0, "x", "y"]]})
    asked = {"cells": [["[/x] h2o", "part"]], "examples": [[0, "e", "p"]]}
    told["20260105T000000Z-e"] = manifest(asked=asked)
    for name, one in told.items():
        (run / "manifests" / f"{name}.json").write_text(json.dumps(one))
    (run / "manifests" / "20260106T000000Z-f.json").symlink_to(outside / "notes.jsonl")
    os.mkfifo(run / "manifests" / "20260107T000000Z-g.json")
    (run / "claims").mkdir()
    (run / "claims" / "host-1-abcdef.lock").symlink_to(outside / "victim.lock")
    os.mkfifo(run / "claims" / "pipe.lock")


def _shards(run: Path, outside: Path) -> None:
    good = "".join(json.dumps(one) + "\n" for one in records())
    bad = "".join(
        json.dumps(make(key=f"bad{at}", run_id=RUN) | {name: value}) + "\n" for at, (name, value) in enumerate(UNFIT.items())
    )
    nan = json.dumps(make(key="nan", run_id=RUN)).replace('"chance": 0.0', '"chance": NaN') + "\n"
    deep = (
        json.dumps(make(key="deep", run_id=RUN)).replace('"point": {}', '"point": {"a": ' + "[" * 600 + "]" * 600 + "}") + "\n"
    )
    half = json.dumps(make(key="half", run_id=RUN)).replace('"output": "4271893"', r'"output": "\ud83d"') + "\n"
    (run / "records-host-1-abcdef.jsonl").write_text(good + bad + nan + deep + half)
    (run / "records-notes.jsonl").write_text('{"todo": "call them"}\n{"todo": "unfini')
    (run / "records-link.jsonl").symlink_to(outside / "notes.jsonl")
    (run / "records-dangling.jsonl").symlink_to(outside / "nowhere.jsonl")
    (run / "records-folder.jsonl").mkdir()
    os.link(outside / "notes.jsonl", run / "records-hard.jsonl")
    os.mkfifo(run / "records-pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(run)  # a socket's name is short
        try:
            listening.bind("records-socket.jsonl")
        finally:
            os.chdir(here)


def untouched(place: Path) -> list[str]:
    """What is not as `build` left it: files outside the run that changed, came or went, and code that ran."""
    found = [f"outside/{name}" for name in _differs(place / "before", place / "outside")]
    found += ["victim.lock"] if (place / "victim.lock").read_text() != "mine" else []
    return found + (["code ran"] if (place / "ran").exists() else [])


def _differs(before: Path, after: Path) -> list[str]:
    names = {path.name for folder in (before, after) for path in folder.iterdir()}
    return sorted(
        n
        for n in names
        if not all((f / n).exists() for f in (before, after)) or (before / n).read_bytes() != (after / n).read_bytes()
    )
