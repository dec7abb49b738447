"""Makes records: keys, the fields every record shares, failures on disk, progress. It runs nothing and scores nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType, TracebackType
from typing import Any

from tqdm import tqdm

from harness.kv.shape import ModelShape
from harness.lm.serve import Served
from harness.run.cells import Cell
from harness.run.identity import code_hash, record_key
from harness.run.store import Store
from harness.types import Bytes, Example, Prompt, Record, Task

NOTHING = "nothing was compressed: the context is not longer than what the stack keeps exactly"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all records of an invocation share."""

    run_id: str
    model: str
    identity: Mapping[str, Any]  # model, code hash and library versions: part of every key
    seed: int
    memory_limit: int
    attn: str
    kv_dtype: str
    shape: ModelShape
    progress: bool = True


@dataclass(frozen=True)
class Work:
    """One record to make: an example under a cell."""

    example: Example
    prompt: Prompt
    cell: Cell
    key: str


class Recorder:
    """Writes the records of one invocation; use it as a context manager, which shows progress while it is open."""

    def __init__(
        self, task: Task, store: Store, setup: Setup, total: int, shared: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.task, self.store, self.setup, self.shared = task, store, setup, shared
        self.failures: list[str] = []
        self.bar = tqdm(total=total, unit="rec", desc=setup.run_id, disable=not setup.progress or not total)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.close()

    def write(self, records: Sequence[Record]) -> None:
        """Append records to the store; failures are also remembered for the end."""
        self.store.append(records)
        self.failures += [f"{r.stack} {r.point} {r.example_id}: {r.error}" for r in records if r.status == "failed"]
        self.bar.update(len(records))

    def failed(self, work: Work, line: str, trace: str) -> Record:
        """A record of a failure, its traceback in a file of the run folder."""
        name = f"{work.key[:16]}.txt"
        folder = self.store.folder / "failures"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(trace, encoding="utf-8")
        return self.record(work, status="failed", error=f"{line} (failures/{name})")

    def unserved(self, work: Work, served: Served) -> Record:
        """A record of a job that was refused or failed."""
        if served.status == "failed":
            return self.failed(work, served.error or "", served.trace)
        return self.record(work, status=served.status, error=served.error)

    def measured(self, served: Served) -> dict[str, Any]:
        """The fields that say what the cache held and what happened to it."""
        row, final, shape = served.row, served.final, self.setup.shape
        assert row is not None
        held = [n for layer in row.held() for n in layer]
        touched, itemsize = row.touched(), row.itemsize
        nothing = row.stack.compresses and touched == 0
        return {
            "status": "not_exercised" if nothing else "ok",
            "error": NOTHING if nothing else None,
            "tokens_seen": row.seen,
            "tokens_kept": sum(held) / len(held),
            "entries_touched": touched,
            "codec_info": row.codec_info(),
            "kv_bytes_context": served.context.total,
            "kv_bytes_final": final.bytes().total,
            "kv_bytes_peak": served.peak,
            "kv_bytes_peak_prefill": served.peak_prefill,
            "kv_bytes_full": shape.full_bytes(row.seen, itemsize),
            "kv_bytes_full_final": shape.full_bytes(final.seen, itemsize),
            "bytes": breakdown(served.context),
            "timings": served.timings,
        }

    def record(self, work: Work, **fields: Any) -> Record:
        """A record with the fields that follow from the example, the cell and the run, and `fields`."""
        example, prompt, cell, task = work.example, work.prompt, work.cell, self.task
        shared: dict[str, Any] = {
            "key": work.key,
            "run_id": self.setup.run_id,
            "example_id": example.id,
            "group_id": example.group_id or example.id,
            "prompt_sha256": prompt.sha256,
            "first_ids": list(prompt.ids[:4]),
            "n_prompt": len(prompt.ids),
            "truncated": example.truncated,
            "length": example.length,
            "depth": example.depth,
            "model": self.setup.model,
            "task": task.name,
            "stack": cell.label,
            "stack_config": cell.config,
            "point": cell.point,
            "phase": cell.stack.phase,
            "query_aware": task.query_aware,
            "positions": cell.stack.positions,
            "attn": self.setup.attn,
            "storage": "packed",
            "kv_dtype": self.setup.kv_dtype,
            "layers_compressed": list(self.setup.shape.full_layers) if cell.stack.compresses else [],
            "gold": list(example.answers),
            "metric": task.metric,
            "chance": task.chance,
            "seed": self.setup.seed,
        }
        return Record(**(shared | dict(self.shared) | fields))


def key(setup: Setup, task: Task, example: Example, prompt: Prompt, cell: Cell) -> str:
    """The identity of a record: everything that decides its content."""
    return record_key(
        {
            "example": asdict(example),
            "prompt": prompt.sha256,
            "query_aware": task.query_aware,
            "stack": cell.config,
            "point": cell.point,
            "label": cell.label,
            "stack_code": code_hash(cell.config),  # a method from outside the project is part of the key
            "seed": setup.seed,
            **setup.identity,
        }
    )


def breakdown(total: Bytes) -> dict[str, dict[str, int]]:
    """Bytes by kind, as records hold them; what storages hold beyond their elements is padding."""
    whole = total + Bytes({}, {})
    padding = sum(whole.allocated[kind] - whole.logical[kind] for kind in whole.logical)
    return {"logical": dict(whole.logical), "allocated": {**whole.logical, "padding": whole.logical["padding"] + padding}}
