"""lm-eval tasks of every output type on local text, written where a test wants them, and their requests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import yaml

from tasks.lm_eval_task import Document, LmEval

CHOICE, CLOZE, TEXT, ANSWER = "local_choice", "local_cloze", "local_text", "local_answer"
_ANSWER = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
_OUTPUT = {
    CHOICE: {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [
            {"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm", "acc_mutual_info")
        ],
    },
    CLOZE: {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": " {{word}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    TEXT: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
        ],
    },
    ANSWER: {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": _ANSWER,
        "filter_list": [
            {"name": "first", "filter": [{"function": "regex", "regex_pattern": r"(\w+)"}, {"function": "take_first"}]},
            {"name": "plain", "filter": [{"function": "take_first"}]},
        ],
    },
}


def documents(n: int, words: int = 150) -> list[dict[str, Any]]:
    """Technical English with the last word of a passage to be found, among four of the same passage."""
    rng = random.Random(7)
    plain = ([word for word in text.split() if word.isalpha()] for _, text in sorted(topics.items()))
    texts = [text for text in plain if len(text) > 2 * words]
    out = []
    for i in range(n):
        source = texts[i % len(texts)]
        start = rng.randrange(len(source) - words)
        passage = source[start : start + words]
        choices = [passage[-1], *rng.sample(sorted({w for w in passage[:-1] if w != passage[-1]}), 3)]
        gold = rng.randrange(4)
        choices[0], choices[gold] = choices[gold], choices[0]
        context = " ".join(passage[:-1])
        row = {"context": context, "choices": choices, "gold": gold, "word": passage[-1], "text": " ".join(passage)}
        out.append(row)
    return out


def write(folder: Path, n: int, **changes: dict[str, Any]) -> Path:
    """The four tasks as YAMLs over one JSON-lines file; changes by task name. Returns the folder, for include_path."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in documents(n)), encoding="utf-8")
    for name, output in _OUTPUT.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
            "test_split": "test",
            "metadata": {"version": 1.0},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | output | changes.get(name, {})), encoding="utf-8")
    return folder


def loaded(tokenizer: Any, **settings: Any) -> list[Document]:
    """Documents of lm-eval tasks as our task gives them."""
    return list(LmEval(**settings).load(tokenizer, 0).documents.values())
