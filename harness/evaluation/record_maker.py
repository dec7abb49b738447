"""Makes records: the fields that every record has, and those that say what the cache held and what happened to it."""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import Unpack

from harness.engine.requests import Result
from harness.evaluation.planned import Planned, Setup, sample_of
from harness.evaluation.record_fields import Fields
from harness.types import Bytes, Example, Record, Task

NOTHING = "nothing was compressed: every token is kept, and as it was (a stack or budget that keeps all, or a short context)"


class RecordMaker:
    """Makes the records of one task in one invocation."""

    def __init__(self, task: Task, setup: Setup) -> None:
        self.task, self.setup = task, setup

    def measured(self, result: Result[Planned]) -> Fields:
        """The fields that say what the cache held and what happened to it."""
        start, final, shape = result.start, result.final, self.setup.shape
        held = [n for layer in start.held() for n in layer]
        nothing = start.stack.compresses and result.touched == 0
        return {
            "status": "not_exercised" if nothing else "ok",
            "error": NOTHING if nothing else None,
            "tokens_seen": start.seen,
            "tokens_kept": sum(held) / len(held),
            "entries_touched": result.entries,
            "rope_length": start.length,
            "codec_info": start.codec_info(),
            "storage": start.storage,
            "layer_budget": start.layer_budget,
            "kv_bytes_context": result.context.total,
            "kv_bytes_final": final.bytes().total,
            "kv_bytes_peak": result.peak,
            "kv_bytes_peak_prefill": result.peak_prefill,
            "kv_bytes_full": shape.full_bytes(start.seen, start.itemsize),
            "kv_bytes_full_final": shape.full_bytes(final.seen, start.itemsize),
            "reach": shape.reach(start.seen, start.itemsize),
            "bytes": breakdown(result.context),
            "timings": result.timings,
        }

    def record(self, planned: Planned, **fields: Unpack[Fields]) -> Record:
        """A record with the fields that follow from the example, the arm and the run, and `fields`."""
        example, prompt, arm, task = planned.example, planned.prompt, planned.arm, self.task
        known = Record(
            key=planned.key,
            run_id=self.setup.run_id,
            example_id=example.id,
            group_id=example.group_id or example.id,
            prompt_sha256=prompt.sha256,
            sample_sha256=sample_of(self.setup.identity, example, planned.seed),
            first_ids=list(prompt.ids[:4]),
            n_prompt=len(prompt.ids),
            truncated=example.truncated,
            length=example.length,
            depth=example.depth,
            depth_realised=example.depth_realised,
            control_text=prompt.control_text,
            order=example.order,
            model=self.setup.model,
            task=task.name,
            stack=arm.label,
            stack_config=arm.config,
            point=arm.point,
            phase=arm.stack.phase,
            query_aware=task.query_aware,
            positions=arm.stack.positions,
            attn=self.setup.attn,
            batch_invariant=self.setup.batch_invariant,
            adaptive=self.setup.adaptive,
            storage="packed",  # until measured
            kv_dtype=self.setup.kv_dtype,
            layers_compressed=self.setup.shape.of_model(self.setup.shape.full_layers) if arm.stack.compresses else [],
            gold=list(example.answers),
            metric=task.metric,
            chance=guess(example, task),
            seed=planned.seed,
        )
        return replace(known, **planned.shared | fields)


def guess(example: Example, task: Task) -> float:
    """Score of a guess: of one choice among an example's, as many as it has; else what the task says."""
    if not example.choices:
        return task.chance
    return sum(choice in example.answers for choice in example.choices) / len(example.choices)


def breakdown(total: Bytes) -> dict[str, dict[str, int]]:
    """Bytes by kind, as records hold them; what storages hold beyond their elements is padding."""
    whole = total + Bytes({}, {})
    padding = sum(whole.allocated[kind] - whole.logical[kind] for kind in whole.logical)
    return {"logical": dict(whole.logical), "allocated": {**whole.logical, "padding": whole.logical["padding"] + padding}}
