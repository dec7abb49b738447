"""The values that flow through one run; it knows no model, no file format and no policy.

Shape legend used across the project (a tensor's suffix names its axes):
    B batch rows, H KV heads, Q query heads, G query heads per KV head, N stored tokens, L new tokens, T tokens, D head dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from harness.errors import require

if TYPE_CHECKING:
    from torch import Tensor  # reports read records without it

SCHEMA = 3
SCHEMAS_READ = (1, 2, 3)  # fields that an older one lacks have a default in Record
BYTE_KINDS = ("payload", "metadata", "tail", "positions", "state", "recurrent", "padding", "scratch")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question on one context, as text; every stack of a run sees the same ones."""

    id: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    group_id: str = ""  # the document; bootstrap resamples these
    length: int | None = None  # asked length in tokens, template and answer room included
    depth: float | None = None  # 0..1, where the evidence was asked to stand
    depth_realised: float | None = None  # 0..1, the share of the prose's tokens before it
    max_new_tokens: int = 32
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()  # scored by log-likelihood instead of generating; answers hold the right ones
    truncated: bool = False
    distractors: tuple[str, ...] = ()  # values in the context that are not the answer; the strict score reads them
    order: int | None = None  # of several questions on one context, which one this is, from 1


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids of an example: the concatenation of three separately tokenized pieces."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer_prefix: tuple[int, ...]
    control_text: int = 0  # words of the user's text that the model reads as the template's

    @property
    def ids(self) -> tuple[int, ...]:
        return self.context + self.question + self.answer_prefix

    @cached_property
    def sha256(self) -> str:
        """Digest of the ids and of where the pieces end."""
        return hashlib.sha256(repr((self.context, self.question, self.answer_prefix)).encode()).hexdigest()

    def split(self, query_aware: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ids compressed, ids held back until after compression); at least one id is held back in both modes."""
        first = self.context + self.question if query_aware else self.context
        held = self.ids[len(first) :]
        return (first, held) if held else (first[:-1], first[-1:])


@runtime_checkable
class Tokens(Protocol):
    """What a task may ask of a tokenizer; `harness.models.tokenizer` implements it."""

    @property
    def max_length(self) -> int | None:
        """Positions the model was built for, or None when unlimited."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special token added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens stripped."""
        ...

    def prompt(self, context: str, question: str, answer_prefix: str, *, chat: bool) -> Prompt:
        """Ids of the three pieces with the chat template around them (or BOS alone), exactly one BOS where expected."""
        ...


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a task says of one answer: the headline number and the others beside it."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {"value": self.value, **self.metrics}.items():
            require(isinstance(value, (int, float)), f"score {name}", value, "a number")


class Corpus(Protocol):
    """Running text with a name, a licence and a digest; `tasks.corpus` holds the sources."""

    @property
    def name(self) -> str: ...

    @property
    def licence(self) -> str: ...

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""

    def documents(self) -> Sequence[str]:
        """The text as a list of documents, each plain prose."""
        ...


class Task(Protocol):
    """Examples and a score; it never sees the cache or the stack."""

    @property
    def name(self) -> str: ...

    @property
    def metric(self) -> str: ...

    @property
    def chance(self) -> float:
        """Score of a guess; the frontier's hypervolume and the discrimination gate read it."""
        ...

    @property
    def query_aware(self) -> bool: ...

    @property
    def chat(self) -> bool: ...

    def examples(self, tokens: Tokens, corpus: Corpus | None, seed: int) -> Sequence[Example]:
        """All examples in order; the same seed gives the same ones in any process and any order."""
        ...

    def score(self, example: Example, answer: str) -> Score: ...


@dataclass(frozen=True)
class KV:
    """Exact tokens of some KV heads that follow one another: k_HND, v_HND, and the original position of the first of them."""

    k_HND: Tensor
    v_HND: Tensor
    start: int

    @property
    def n(self) -> int:
        return int(self.k_HND.shape[1])


@dataclass(frozen=True)
class Bytes:
    """Bytes by kind, logical (what the content needs) and allocated (what the storages hold)."""

    logical: Mapping[str, int]
    allocated: Mapping[str, int]

    @property
    def total(self) -> int:
        """Allocated bytes, all kinds: the number on the axis."""
        return sum(self.allocated.values())

    def __add__(self, other: Bytes) -> Bytes:
        pairs = ((self.logical, other.logical), (self.allocated, other.allocated))
        return Bytes(*({kind: a.get(kind, 0) + b.get(kind, 0) for kind in BYTE_KINDS} for a, b in pairs))


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example under one arm: the only thing a run writes. results/README.md says what each field means."""

    key: str
    run_id: str
    example_id: str
    group_id: str
    prompt_sha256: str
    sample_sha256: str = ""  # example, task settings and model: a later invocation with another one makes this record stale
    first_ids: list[int]
    n_prompt: int
    truncated: bool
    length: int | None
    depth: float | None
    model: str
    task: str
    stack: str
    stack_config: dict[str, Any]
    point: dict[str, Any]
    phase: str
    query_aware: bool
    positions: str
    attn: str
    storage: str
    kv_dtype: str
    gold: list[str]
    metric: str
    seed: int
    batch_invariant: bool = False  # logits are the same bits whatever shares a batch
    adaptive: bool = False  # how many examples there are was decided while looking at results
    higher_is_better: bool = True
    aggregate: str = "mean"
    weight: float = 1.0
    chance: float = 0.0
    layers_compressed: list[int] = field(default_factory=list)
    tokens_seen: int = 0
    tokens_kept: float = 0.0  # mean over layers and KV heads, after the context was compressed
    entries_touched: int = 0  # rows evicted or stored inexactly, over layers and KV heads: after the context, or at the end
    tokens_merged: int | None = None  # evicted tokens merged into kept ones, over layers and KV heads; None without a merge
    compressed_share: float | None = None  # of a text's scored tokens, those predicted from a store that had lost something
    codec_info: dict[str, Any] = field(default_factory=dict)
    layer_budget: str | None = None  # how rows were divided over layers; "(asked: NAME)" follows where that was something else
    output: str | None = None
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # measures that could not be had, and why
    decoding: str = ""  # how answers are chosen, and what the model's or the task's settings ask for that is not done
    stop_reason: str | None = None
    kv_bytes_context: int | None = None
    kv_bytes_final: int | None = None
    kv_bytes_peak: int | None = None
    kv_bytes_peak_prefill: int | None = None
    kv_bytes_full: int | None = None  # full cache, same sample, at the moment of kv_bytes_context
    kv_bytes_full_final: int | None = None  # full cache, same sample, same tokens, at the end of the answer
    reach: float | None = None  # share of the full cache's bytes in layers that stacks act on (streams: at the end)
    bytes: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    series_path: str | None = None
    depth_realised: float | None = None  # 0..1, the share of the prose's tokens before the evidence
    control_text: int = 0  # words of the user's text that the model reads as the template's
    chunk: int | None = None  # streams: tokens fed between two compressions
    order: int | None = None  # of several questions on one context, which one this was, from 1
    question: str = ""  # as it was asked, cut to an excerpt; a page shows it beside answers that changed
    rope_length: int | None = None  # tokens that the rotation was computed for, where it depends on the length of the text
    status: str = "ok"  # ok | refused | failed | not_exercised
    error: str | None = None
    written_at: str = ""  # UTC; the store fills this and the two below in
    writer: str = ""  # the process, as in the name of its shard
    attempt: int = 1  # how many records of this key there were, this one among them
    schema: int = SCHEMA
