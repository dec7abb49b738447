"""Our tasks as data for lm-eval's YAMLs beside this file: prompts drawn for the model's own tokenizer, and our scores.

Settings are those of conf/task; `--metadata '{"lengths": [1024], "corpus": "stdlib", "seed": 1}'` changes them. A
prompt is one text here, so lm-eval's count of its tokens may differ from ours by one where two pieces meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset, Split
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from harness.configure.trusted import Builder
from harness.errors import UserError, require
from harness.files.paths import CONF
from harness.types import Example, Task
from tasks import scoring
from tasks.plain_tokens import PlainTokens


def needle(**metadata: Any) -> dict[str, Dataset]:
    """The needle task's prompts."""
    return _prompts("needle", metadata)


def docqa(**metadata: Any) -> dict[str, Dataset]:
    """The document question task's prompts."""
    return _prompts("docqa", metadata)


def stream(**metadata: Any) -> dict[str, Dataset]:
    """The stream task's documents."""
    rows = [{"id": one.id, "text": one.context} for one in _examples("stream", metadata)[1]]
    return {"test": Dataset.from_list(rows, split=Split.TEST)}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Contains, strict, exact and f1 of one answer, as in our own runs."""
    score = scoring.judge(results[0], doc["answers"], metric="contains", rivals=doc["distractors"])
    return {name: float(score.metrics.get(name, score.value)) for name in scoring.METRICS}


def _prompts(name: str, metadata: dict[str, Any]) -> dict[str, Dataset]:
    _, examples = _examples(name, metadata)
    rows = [
        {
            "id": one.id,
            "group_id": one.group_id,
            "prompt": one.context + one.question + one.answer_prefix,
            "answers": list(one.answers),
            "distractors": list(one.distractors),
            "length": one.length,
            "depth": one.depth,
        }
        for one in examples
    ]
    return {"test": Dataset.from_list(rows, split=Split.TEST)}


def _examples(name: str, metadata: dict[str, Any]) -> tuple[Task, Sequence[Example]]:
    """A task with the settings that `metadata` has of it, and its examples; UserError for a value that is not possible.

    Metadata may come with anybody's YAML: settings are values, and name nothing that is run.
    """
    settings = _member("task", name)
    settings |= {key: value for key, value in metadata.items() if key in settings and not key.startswith("_")}
    task: Task = Builder()(settings, "task")
    chosen, seed = metadata.get("corpus", "kjv"), metadata.get("seed", 0)
    require(type(seed) is int, "metadata seed", seed, "a whole number")
    known_texts = sorted(file.stem for file in (CONF / "corpus").glob("*.yaml"))
    require(chosen in known_texts, "metadata corpus", chosen, f"one of {', '.join(known_texts)}")
    needed = getattr(task, "needs_corpus", True)
    corpus = Builder()(_member("corpus", chosen), "corpus") if needed else None
    source = next((metadata[key] for key in ("tokenizer", "pretrained") if metadata.get(key)), None)
    if source is None:
        raise UserError(
            "these tasks fit their prompts to a tokenizer: name one with --model_args pretrained=... or tokenizer=..."
        )
    tokens = PlainTokens(AutoTokenizer.from_pretrained(source, trust_remote_code=False))
    return task, task.examples(tokens, corpus, seed)


def _member(group: str, name: str) -> dict[str, Any]:
    """A YAML of conf/ that needs no other."""
    found: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"), resolve=True)  # type: ignore[assignment]
    return found
