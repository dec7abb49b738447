"""lm-eval's own tasks: which ones, their settings, and the requests that they make.

Prompts, few-shot examples, metrics and filters are lm-eval's; random generators are seeded anew for every task, so
that neither the order of tasks nor a group around them changes a prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from harness.errors import require
from harness.types import Corpus, Example, Score, Tokens
from tasks.checks import listed, require_bools, whole
from tasks.lm_eval_load import OTHER_SEED, chat_template, load_tasks

FIRST = "first"
PASSAGES = (  # fields of documents, by the names that lm-eval's data sets give what several questions are asked about
    *("group_id", "context", "passage", "article", "story", "paragraph", "document", "background"),
)
TRUNCATE = ("refuse", "left")


@dataclass(frozen=True)
class Document:
    """One document of one task: lm-eval's number of it, its content, and the requests it makes (lm-eval Instances)."""

    task: str
    number: int
    doc: Any
    instances: tuple[Any, ...]

    @property
    def id(self) -> str:
        return f"{self.task}-{self.number}"


@dataclass(frozen=True)
class Loaded:
    """lm-eval's tasks and groups by name, and every document by its id."""

    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    documents: Mapping[str, Document]


@dataclass(kw_only=True)
class LmEval:
    """Tasks or groups of lm-eval, scored by lm-eval. Not frozen: it holds lm-eval's own tasks, which change as they are used.

    A prompt of lm-eval is one text, so the question is part of what is compressed (query-aware); the last token is fed
    afterwards.

    Args:
        name: One task or group, or a list of them.
        num_fewshot: Examples in the prompt; None takes what each task says. A task that says 0 keeps 0.
        metadata: Passed to the tasks' data functions, for example max_seq_lengths of RULER.
        include_path: Folder with further task YAMLs.
        chat: Whether the model's chat template goes around the prompt.
        multiturn: With `chat`, few-shot examples as turns of the conversation.
        system_instruction: Text before the prompt.
        generation: Changes to the tasks' generation settings, for example max_gen_toks.
        truncate: A prompt beyond the model's positions: refuse, or left: its beginning is cut off (recorded).
        metric: The headline metric; "first" takes the first that a document has.
        bootstrap_iters: Resamples for standard errors of lm-eval without a formula.
        unsafe_code: Whether tasks that run generated code may do so.
    """

    runner: ClassVar[str] = "lm_eval"
    needs_corpus: ClassVar[bool] = False
    query_aware: ClassVar[bool] = True
    chance: ClassVar[float] = 0.0  # the record of a multiple choice says its own

    runs_code: ClassVar[tuple[str, ...]] = ("include_path", "unsafe_code")  # settings that a user must say himself

    name: Any  # a text or a list of texts; once made, one text
    num_fewshot: int | None = None
    metadata: Mapping[str, Any] | None = None
    include_path: str | None = None
    chat: bool = False
    multiturn: bool = True
    system_instruction: str | None = None
    generation: Mapping[str, Any] | None = None
    truncate: str = "refuse"
    metric: str = FIRST
    bootstrap_iters: int = 1000
    unsafe_code: bool = False
    names: tuple[str, ...] = field(init=False, default=())
    loaded: Loaded = field(init=False, default=Loaded({}, {}, {}), compare=False, repr=False)

    def __post_init__(self) -> None:
        given = (self.name,) if isinstance(self.name, str) else listed(self.name)
        names = [name for name in given if isinstance(name, str) and name and "," not in name]
        fits = bool(names) and len(names) == len(given)
        require(fits, "task.name", self.name, "a task or group of lm-eval, or a list of them (python -m lm_eval ls tasks)")
        self.names, self.name = tuple(dict.fromkeys(names)), "+".join(names)
        shots = self.num_fewshot
        require(shots is None or whole(shots, 0), "task.num_fewshot", shots, "a whole number from 0, or null")
        require(whole(self.bootstrap_iters, 0), "task.bootstrap_iters", self.bootstrap_iters, "a whole number from 0")
        if self.include_path is not None:
            self.include_path = str(Path(self.include_path).expanduser())
            require(Path(self.include_path).is_dir(), "task.include_path", self.include_path, "there is no such folder")
        require(self.truncate in TRUNCATE, "task.truncate", self.truncate, f"one of {', '.join(TRUNCATE)}")
        for key in ("metadata", "generation"):
            value = getattr(self, key)
            require(value is None or isinstance(value, Mapping), f"task.{key}", value, "a dictionary, or null")
        require_bools(self, "chat", "multiturn", "unsafe_code")

    def load(self, tokenizer: Any, seed: int, render: Callable[..., str] | None = None) -> Loaded:
        """Tasks, groups and requests, rendered with a transformers tokenizer; the same in any process.

        `render` puts the chat template around messages; None: the tokenizer's own.

        Raises:
            UserError: an unknown task, data that is not available, a missing package, code that is not allowed to run.
        """
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        render = render or partial(tokenizer.apply_chat_template, tokenize=False)
        metadata = {"tokenizer": str(tokenizer.name_or_path), **(self.metadata or {})}
        found = load_tasks(self.names, metadata, self.include_path, seed)
        for task in found["tasks"].values():
            self._set_up(task, seed)
            task.build_all_requests(
                rank=0,
                world_size=1,
                system_instruction=self.system_instruction,
                apply_chat_template=self.chat,
                fewshot_as_multiturn=self.multiturn,
                chat_template=chat_template(render) if self.chat else None,
            )
        by_task = [_documents(name, task) for name, task in found["tasks"].items()]
        # One document of each task before the second of any: a limit still covers all tasks.
        documents = [one for row in zip_longest(*by_task) for one in row if one is not None]
        return Loaded(found["tasks"], found.get("groups", {}), {one.id: one for one in documents})

    def _set_up(self, task: Any, seed: int) -> None:
        """What lm-eval's own command does to a loaded task before it renders prompts."""
        unsafe = bool(getattr(task, "UNSAFE_CODE", False)) and not self.unsafe_code
        require(not unsafe, "task.name", task.task_name, "it runs generated code: set task.unsafe_code=true to allow that")
        require(not getattr(task, "MULTIMODAL", False), "task.name", task.task_name, "it needs images or sound")
        if self.generation and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value=dict(self.generation), update=True)
        own = task.get_config("num_fewshot")
        if own is None or (self.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=self.num_fewshot or 0)
        task.set_fewshot_seed(seed=OTHER_SEED + seed)

    def examples(self, tokens: Tokens, corpus: Corpus | None, seed: int) -> list[Example]:
        """Every document as an example: its id, first prompt, target and continuations; `loaded` holds the requests."""
        tokenizer: Any = tokens
        self.loaded = self.load(tokenizer.hf, seed, tokenizer.render)
        return [_example(self.loaded.tasks[one.task], one) for one in self.loaded.documents.values()]

    def score(self, example: Example, answer: str) -> Score:
        """lm-eval scores, from the answers to all requests of a document."""
        raise NotImplementedError("a document of lm-eval is scored by lm-eval")


def _documents(name: str, task: Any) -> list[Document]:
    found: dict[int, list[Any]] = {}
    for instance in task.instances:
        found.setdefault(instance.doc_id, []).append(instance)
    return [Document(name, n, same[0].doc, tuple(sorted(same, key=lambda i: i.idx))) for n, same in found.items()]


def _passage(doc: Any) -> str | None:
    """A digest of what a document is about, which makes it depend on others with the same; None where it stands alone."""
    found = next((doc[name] for name in PASSAGES if doc.get(name)), None) if isinstance(doc, Mapping) else None
    return found if found is None else hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _example(task: Any, document: Document) -> Example:
    target = task.doc_to_target(document.doc)
    if task.OUTPUT_TYPE == "multiple_choice" and isinstance(target, int) and not task.multiple_input:
        target = task.doc_to_choice(document.doc)[target]
    answers = target if isinstance(target, list | tuple) else [target]
    length = document.doc.get("max_length") if isinstance(document.doc, Mapping) else None
    passage = _passage(document.doc)
    rolling = document.instances[0].request_type == "loglikelihood_rolling"
    return Example(
        id=document.id,
        context=str(document.instances[0].args[0]),
        question="",
        answer_prefix="",
        answers=() if rolling else tuple(map(str, answers)),
        group_id="" if passage is None else f"{document.task}-{passage}",
        choices=tuple(str(one.args[1]) for one in document.instances if one.request_type == "loglikelihood"),
        length=length if whole(length, 1) else None,
    )
