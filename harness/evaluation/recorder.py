"""Makes records: keys, the fields every record shares, failures on disk, progress. It runs nothing and scores nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

from tqdm import tqdm

from harness.configure.arms import Arm
from harness.engine.requests import Result
from harness.files.digests import digest
from harness.kv.shape import ModelShape
from harness.records.failures import naming, trace_file
from harness.records.keys import code_hash, record_key
from harness.records.store import Store
from harness.types import Bytes, Example, Prompt, Record, Task

TOGETHER = 8  # examples on one context that are claimed at once
NOTHING = "nothing was compressed: the context is not longer than what the stack keeps exactly"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all records of an invocation share."""

    run_id: str
    model: str
    identity: Mapping[str, Any]  # model, task settings, code hash and library versions: part of every key
    memory_limit: int
    attn: str
    kv_dtype: str
    shape: ModelShape
    progress: bool = True
    views: bool = True  # whether decoded copies of stores may take what a wave leaves of the memory limit


@dataclass(frozen=True)
class Planned:
    """One record to make: an example under a cell."""

    example: Example
    prompt: Prompt
    cell: Arm
    seed: int
    claim: str  # works with one claim are made by one writer
    parts: tuple[str, str]  # digests of the example and what it is run with, and of the cell

    @cached_property
    def key(self) -> str:
        """The identity of the record."""
        return record_key(*self.parts)


class Recorder:
    """Writes the records of one invocation; use it as a context manager, which shows progress while it is open.

    `shared` gives the fields that all records of a work have, whatever becomes of it. The bar counts the records that were
    missing at the start, whoever makes them.
    """

    def __init__(
        self,
        task: Task,
        store: Store[Planned],
        setup: Setup,
        works: Sequence[Planned],
        shared: Callable[[Planned], Mapping[str, Any]] = lambda work: {},
    ) -> None:
        self.task, self.store, self.setup, self.works, self.shared = task, store, setup, works, shared
        self.failures: list[str] = []
        self._left = {one.key: (one.seed, one.example.id) for one in store.missing(works)}
        self._examples = Counter(self._left.values())  # records missing of each
        self._asked = len(self._examples)
        self.bar = tqdm(
            total=len(self._left), unit="rec", desc=setup.run_id, disable=not setup.progress or not self._left, mininterval=0.5
        )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.close()

    def rounds(self) -> Iterator[Iterator[Planned]]:
        """What to do, as `Store.rounds` hands it out: works of one claim stand together; those of a failed cell fail."""
        for free in self.store.rounds(self.works):
            yield self._possible(one for group in free for one in group)
            self._show(())

    def _possible(self, works: Iterable[Planned]) -> Iterator[Planned]:
        for work in works:
            if work.cell.failure is None:
                yield work
            else:
                self.write([self.failed(work, *work.cell.failure)])

    def write(self, records: Sequence[Record]) -> None:
        """Append records to the store; failures are also remembered for the end."""
        self.store.append(records)
        self.failures += [f"{r.stack} {r.point} {r.example_id}: {r.error}" for r in records if r.status == "failed"]
        self._show([r.key for r in records])

    def _show(self, keys: Iterable[str]) -> None:
        """Take records off what is left, other writers' too, and move the bar."""
        gone = [key for key in {*keys, *self.store.others} if key in self._left]
        for key in gone:
            self._examples[self._left.pop(key)] -= 1
        done = sum(left <= 0 for left in self._examples.values())
        words = f"{done}/{self._asked} examples" + (f", {len(self.failures)} failed" if self.failures else "")
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update(len(gone))

    def failed(self, work: Planned, line: str, trace: str) -> Record:
        """A record of a failure, its traceback in a file of the run folder."""
        if not trace:
            return self.record(work, status="failed", error=line)
        file = trace_file(work.key)
        self.store.write(file, lambda path: path.write_text(trace, encoding="utf-8"))
        return self.record(work, status="failed", error=naming(line, file))

    def refused(self, work: Planned, line: str) -> Record:
        """A record of what a rule does not allow."""
        return self.record(work, status="refused", error=line)

    def unserved(self, work: Planned, served: Result) -> Record:
        """A record of a job that was refused or failed."""
        if served.status == "failed":
            return self.failed(work, served.error or "", served.trace)
        return self.refused(work, served.error or "")

    def measured(self, served: Result) -> dict[str, Any]:
        """The fields that say what the cache held and what happened to it."""
        row, final, shape = served.row, served.final, self.setup.shape
        assert row is not None
        held = [n for layer in row.held() for n in layer]
        itemsize = row.itemsize
        nothing = row.stack.compresses and served.touched == 0
        return {
            "status": "not_exercised" if nothing else "ok",
            "error": NOTHING if nothing else None,
            "tokens_seen": row.seen,
            "tokens_kept": sum(held) / len(held),
            "entries_touched": served.entries,
            "rope_length": row.length,
            "codec_info": row.codec_info(),
            "storage": row.storage,
            "layer_budget": row.layer_budget,
            "kv_bytes_context": served.context.total,
            "kv_bytes_final": final.bytes().total,
            "kv_bytes_peak": served.peak,
            "kv_bytes_peak_prefill": served.peak_prefill,
            "kv_bytes_full": shape.full_bytes(row.seen, itemsize),
            "kv_bytes_full_final": shape.full_bytes(final.seen, itemsize),
            "bytes": breakdown(served.context),
            "timings": served.timings,
        }

    def record(self, work: Planned, **fields: Any) -> Record:
        """A record with the fields that follow from the example, the cell and the run, and `fields`."""
        example, prompt, cell, task = work.example, work.prompt, work.cell, self.task
        common: dict[str, Any] = {
            "key": work.key,
            "run_id": self.setup.run_id,
            "example_id": example.id,
            "group_id": example.group_id or example.id,
            "prompt_sha256": prompt.sha256,
            "sample_sha256": sample_of(self.setup.identity, example, work.seed),
            "first_ids": list(prompt.ids[:4]),
            "n_prompt": len(prompt.ids),
            "truncated": example.truncated,
            "length": example.length,
            "depth": example.depth,
            "depth_realised": example.depth_realised,
            "control_text": prompt.control_text,
            "order": example.order,
            "model": self.setup.model,
            "task": task.name,
            "stack": cell.label,
            "stack_config": cell.config,
            "point": cell.point,
            "phase": cell.stack.phase,
            "query_aware": task.query_aware,
            "positions": cell.stack.positions,
            "attn": self.setup.attn,
            "storage": "packed",  # until measured
            "kv_dtype": self.setup.kv_dtype,
            "layers_compressed": list(self.setup.shape.full_layers) if cell.stack.compresses else [],
            "gold": list(example.answers),
            "metric": task.metric,
            "chance": guess(example, task),
            "seed": work.seed,
        }
        return Record(**(common | dict(self.shared(work)) | fields))


def works_of(
    setup: Setup, task: Task, prompts: Sequence[tuple[Example, Prompt]], cells: Sequence[Arm], seed: int
) -> list[Planned]:
    """The records that examples under cells are; their keys hold everything that decides their content.

    Examples on one context stand together and have one claim, a few at a time: whoever makes them reads it once.
    """
    parts = [cell_part(cell) for cell in cells]
    same: dict[tuple[int, ...], list[Planned]] = {}
    for example, prompt in prompts:
        context = prompt.split(task.query_aware)[0]
        told = {"example": asdict(example), "prompt": prompt.sha256, "query_aware": task.query_aware, "seed": seed}
        name = digest({**told, **setup.identity})
        before = same.setdefault(context, [])
        claim = f"{digest([seed, context])[:16]}-{len(before) // len(cells) // TOGETHER}"
        before += [Planned(example, prompt, cell, seed, claim, (name, part)) for cell, part in zip(cells, parts, strict=True)]
    return [one for works in same.values() for one in works]


def sample_of(identity: Mapping[str, Any], example: Example, seed: int) -> str:
    """Digest of what a record is of, whatever the stack: example, task settings, model. Code and versions are not in it."""
    shown = {name: value for name, value in asdict(example).items() if name != "truncated"}  # a runner may find that later
    return digest({"example": shown, "seed": seed, "model": identity["model"], "task": identity["task"]})


def samples_of(identity: Mapping[str, Any], examples: Mapping[int, Sequence[Example]]) -> dict[str, dict[str, str]]:
    """`sample_of` all examples, by seed and id, as a manifest holds them."""
    return {str(seed): {str(one.id): sample_of(identity, one, seed) for one in found} for seed, found in examples.items()}


def guess(example: Example, task: Task) -> float:
    """Score of a guess: of one choice among an example's, as many as it has; else what the task says."""
    if not example.choices:
        return task.chance
    return sum(choice in example.answers for choice in example.choices) / len(example.choices)


def cell_part(cell: Arm) -> str:
    """The part of a record's key that is the cell's; a method from outside the project is in it with its code."""
    return digest({"stack": cell.config, "point": cell.point, "label": cell.label, "code": code_hash(cell.config)})


def asked(works: Sequence[Planned]) -> dict[str, Any]:
    """What an invocation asks for, for its manifest: `record_key` of any example's and any cell's digest is a record's key."""
    return {
        "examples": [
            [seed, name, part] for seed, name, part in dict.fromkeys((w.seed, w.example.id, w.parts[0]) for w in works)
        ],
        "arms": [[name, part] for name, part in dict.fromkeys((w.cell.name, w.parts[1]) for w in works)],
    }


def breakdown(total: Bytes) -> dict[str, dict[str, int]]:
    """Bytes by kind, as records hold them; what storages hold beyond their elements is padding."""
    whole = total + Bytes({}, {})
    padding = sum(whole.allocated[kind] - whole.logical[kind] for kind in whole.logical)
    return {"logical": dict(whole.logical), "allocated": {**whole.logical, "padding": whole.logical["padding"] + padding}}
