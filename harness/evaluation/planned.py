"""The records to make: an example under an arm each, with a key that holds everything that decides its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from harness.configure.arms import Arm
from harness.evaluation.record_fields import Fields
from harness.files.digests import digest
from harness.files.json_values import Config
from harness.kv.shape import ModelShape
from harness.records.keys import code_hash, record_key
from harness.types import Example, Prompt, Task

TOGETHER = 8  # examples on one context that are claimed at once


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all records of an invocation share."""

    run_id: str
    model: str
    identity: Config  # model, task settings, code hash and library versions: part of every key
    memory_limit: int
    attn: str
    kv_dtype: str
    shape: ModelShape
    progress: bool = True
    batch_invariant: bool = False  # whether logits are the same bits in any company
    adaptive: bool = False  # whether the number of examples is chosen while looking at results
    views: bool = True  # whether decoded copies of stores may take what a batch leaves of the memory limit


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One record to make: an example under an arm.

    claim: records with one claim are made by one writer. digests: of the example and what it is run with, and of the arm.
    shared: fields that the record has whatever becomes of it. refusal: why it cannot be asked at all.
    """

    example: Example
    prompt: Prompt
    arm: Arm
    seed: int
    claim: str
    digests: tuple[str, str]
    shared: Fields = field(default_factory=lambda: Fields())
    refusal: str | None = None

    @cached_property
    def key(self) -> str:
        """The identity of the record."""
        return record_key(*self.digests)

    @property
    def answer_room(self) -> int:
        """Most tokens of an answer; 0 where nothing is generated."""
        return 0 if self.example.choices else self.example.max_new_tokens


def plan(
    setup: Setup,
    task: Task,
    prompts: Sequence[tuple[Example, Prompt]],
    arms: Sequence[Arm],
    seed: int,
    shared: Callable[[Example], Fields] = lambda example: Fields(),
) -> list[Planned]:
    """The records that examples under arms are.

    Examples on one context are neighbours and have one claim, a few at a time: whoever makes them reads it once.
    """
    of_arms = [(arm, arm_digest(arm)) for arm in arms]
    same: dict[tuple[int, ...], list[Planned]] = {}
    for example, prompt in prompts:
        context = prompt.split(task.query_aware)[0]
        asked = {"example": asdict(example), "prompt": prompt.sha256, "query_aware": task.query_aware, "seed": seed}
        name = digest({**asked, **setup.identity})
        before = same.setdefault(context, [])
        claim = f"{digest([seed, context])[:16]}-{len(before) // len(arms) // TOGETHER}"
        fields = shared(example)
        before += [
            Planned(
                example=example,
                prompt=prompt,
                arm=arm,
                seed=seed,
                claim=claim,
                digests=(name, of_arm),
                shared=fields,
            )
            for arm, of_arm in of_arms
        ]
    return [one for planned in same.values() for one in planned]


def sample_of(identity: Config, example: Example, seed: int) -> str:
    """Digest of what a record is of, whatever the stack: example, task settings, model. Code and versions are not in it."""
    shown = {name: value for name, value in asdict(example).items() if name != "truncated"}  # a runner may find that later
    return digest({"example": shown, "seed": seed, "model": identity["model"], "task": identity["task"]})


def samples_of(identity: Config, examples: Mapping[int, Sequence[Example]]) -> dict[str, dict[str, str]]:
    """`sample_of` all examples, by seed and id, as a manifest holds them."""
    return {str(seed): {str(one.id): sample_of(identity, one, seed) for one in found} for seed, found in examples.items()}


def arm_digest(arm: Arm) -> str:
    """The arm's half of a record's key; a method from outside the project is in it with its code."""
    return digest({"stack": arm.config, "point": arm.point, "label": arm.label, "code": code_hash(arm.config)})


def asked(planned: Sequence[Planned]) -> dict[str, list[list[object]]]:
    """What an invocation asks for, for its manifest: `record_key` of any example's and any arm's digest is a record's key."""
    return {
        "examples": [
            [seed, name, of] for seed, name, of in dict.fromkeys((one.seed, one.example.id, one.digests[0]) for one in planned)
        ],
        "cells": [[name, of] for name, of in dict.fromkeys((one.arm.name, one.digests[1]) for one in planned)],
    }
