"""From answers to numbers with lm-eval's own filters, metrics, aggregation and standard errors.

Answers are replayed: lm-eval scores them as if a model had just given them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from harness.errors import require
from harness.lm_eval.documents import Response
from tasks.lm_eval_task import FIRST, Document, Loaded

_LONG = ("doc", "arguments")  # of lm-eval's logged samples: their hashes stay
_GUESSABLE = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What lm-eval says of one document: the headline as a record holds it, and every other number."""

    metric: str
    score: float | None
    weight: float
    aggregate: str
    higher_is_better: bool
    metrics: dict[str, float]
    length: int | None = None


def judge(task: Any, document: Document, responses: Sequence[Response], wanted: str) -> Judged:
    """Score one document from the responses to its requests.

    Perplexities keep what their aggregate is made of: score = negative log-likelihood per unit, weight = units. A metric that
    exists over a whole corpus only (BLEU, F1 over classes) is taken of this document alone.

    Raises:
        UserError: the document has no metric of the name `wanted`.
    """
    values = _values(task, document, responses)
    ruler = all(name.isdigit() for name in values)  # RULER names a metric after each length; -1: not of this document
    if ruler:
        values = {name: value for name, value in values.items() if value != -1}
    require(wanted == FIRST or wanted in values, "task.metric", wanted, f"{document.task} gives {', '.join(values)}")
    name = next(iter(values)) if wanted == FIRST else wanted
    score, weight, aggregate = _parts(task, name, values[name])
    numbers = {key: _number(task, key, value) for key, value in values.items()}
    return Judged(
        metric="match" if ruler else name,
        score=score,
        weight=weight,
        aggregate=aggregate,
        higher_is_better=bool(task.higher_is_better().get(name, True)),
        metrics={key: value for key, value in numbers.items() if value is not None},
        length=int(name) if ruler else None,
    )


def _values(task: Any, document: Document, responses: Sequence[Response]) -> dict[str, Any]:
    """lm-eval's metrics of a document; those of further filters carry the filter's name."""
    instances = [_answered(one, response, one.doc_id) for one, response in zip(document.instances, responses, strict=True)]
    for each in task._filters:
        each.apply(instances)
    found: dict[str, Any] = {}
    for number, key in enumerate(instances[0].filtered_resps):
        results = task.process_results(document.doc, [one.filtered_resps[key] for one in instances])
        found |= {name if number == 0 else f"{name},{key}": value for name, value in results.items()}
    return found


def _answered(instance: Any, response: Response, number: int) -> Any:
    fresh = replace(instance, resps=[response] * (instance.repeats or 1), filtered_resps={})
    fresh.doc_id = number
    return fresh


def _parts(task: Any, name: str, value: Any) -> tuple[float | None, float, str]:
    """(score, weight, aggregate) so that records aggregate to what lm-eval's aggregation gives."""
    how = _aggregation(task, name)
    if how == "perplexity":
        return -float(value), 1.0, "exp_weighted"
    if how in ("weighted_perplexity", "bits_per_byte"):
        total, weight = value
        nll = -float(total) / weight
        return (nll, float(weight), "exp_weighted") if how != "bits_per_byte" else (nll / math.log(2), float(weight), "mean")
    return _number(task, name, value), 1.0, "mean"


def _aggregation(task: Any, name: str) -> str:
    return str(getattr(task.aggregation().get(name.split(",")[0]), "__name__", "mean"))


def _number(task: Any, name: str, value: Any) -> float | None:
    if isinstance(value, Real) and _aggregation(task, name) != "perplexity":
        return float(value)
    try:
        return float(task.aggregation()[name.split(",")[0]]([value]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None


def chance(document: Document, judged: Judged, vocabulary: int, scored: int) -> float:
    """Score of a guess: one of the choices; for perplexities, every token of the vocabulary equally likely."""
    if judged.aggregate == "exp_weighted":
        return math.exp(min(scored * math.log(vocabulary) / judged.weight, 700.0))
    choices = {one.args for one in document.instances if one.request_type == "loglikelihood" and one.args[0]}
    return 1 / len(choices) if len(choices) > 1 and judged.metric in _GUESSABLE else 0.0


def to_output(document: Document, responses: Sequence[Response]) -> str:
    """Responses as a record holds them: the text of a single generation, else JSON."""
    text = responses[0]
    return text if len(responses) == 1 and isinstance(text, str) else json.dumps(list(responses))


def from_output(document: Document, output: str) -> list[Response]:
    """The responses again."""
    if len(document.instances) == 1 and document.instances[0].request_type == "generate_until":
        return [output]
    return [tuple(one) if isinstance(one, list) else one for one in json.loads(output)]


def aggregate(
    loaded: Loaded, responses: Mapping[str, Sequence[Response]], bootstrap_iters: int, unsafe: bool
) -> dict[str, Any]:
    """lm-eval's own results over the documents that `responses` (by document id) has answers of.

    Values, standard errors, groups, versions, configurations and samples (without documents and prompts, whose hashes stay).
    """
    from lm_eval.evaluator import evaluate

    by_task: dict[str, list[Document]] = {}
    for name in responses:
        by_task.setdefault(loaded.documents[name].task, []).append(loaded.documents[name])
    whole = set(by_task) == set(loaded.tasks)
    answers: dict[int, Response] = {}
    for name, documents in by_task.items():
        documents.sort(key=lambda one: one.number)
        _hand_over(loaded.tasks[name], documents, responses, answers)
    found: dict[str, Any] = evaluate(
        lm=replay(answers),
        task_dict={"tasks": {name: loaded.tasks[name] for name in by_task}, "groups": loaded.groups if whole else {}},
        samples={name: [one.number for one in documents] for name, documents in by_task.items()},
        bootstrap_iters=bootstrap_iters,
        log_samples=True,
        confirm_run_unsafe_code=unsafe,
    )
    found["samples"] = {
        name: [{k: v for k, v in sample.items() if k not in _LONG} for sample in samples]
        for name, samples in found["samples"].items()
    }
    return found


def _hand_over(task: Any, documents: Sequence[Document], responses: Mapping[str, Any], answers: dict[int, Response]) -> None:
    """Give a task the recorded requests, so that every stack is scored on the same ones and none is rendered again.

    lm-eval counts the documents of a subset from 0, in ascending order of their numbers.
    """
    fresh: list[Any] = []
    for number, document in enumerate(documents):
        for instance, response in zip(document.instances, responses[document.id], strict=True):
            fresh.append(_answered(instance, response, number))
            fresh[-1].resps = []
            answers[id(fresh[-1])] = response
    task._instances = fresh
    task.build_all_requests = lambda **_: None


def replay(answers: Mapping[int, Response]) -> Any:
    """An lm-eval model that answers each request with what was recorded for it."""
    from lm_eval.api.model import LM

    class Replay(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any]) -> list[Response]:
            return [answers[id(one)] for one in requests]

        loglikelihood_rolling = generate_until = loglikelihood

    return Replay()
