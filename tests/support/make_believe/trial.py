"""Everything that an engine does, once under every stack; what came of it as plain values, to compare devices by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.calibrate.codec_limits import measure
from harness.calibrate.retrieval_heads import Calibration, copy_scores
from harness.engine.answers import Ask
from harness.engine.engine import Engine
from harness.engine.requests import Question, Request, Result, Stream
from harness.kv.sequence_cache import SequenceCache
from harness.lm_eval.encoding import LmEvalRequest, Window
from harness.stages.stack import Stack
from tests.support import asking, conf_tree
from tests.support.make_believe.tensors import FIRST, SECOND
from tests.support.tiny_models import ids

CONTEXT, LIMIT = 96, 4 << 30
MORE = (  # combinations that no member of conf/compress has
    ("sink_h2o_int8", "phase=every_n", "every=3"),
    ("sink_h2o_int8", "positions=cache"),
    ("sink_h2o_int8", "read=cached"),
    ("snapkv_int4", "read=cached"),
    ("int4", "keys.sinks=4", "values.sinks=4"),
    ("fp8_e4m3", "keys.axis=channel", "values.axis=tensor"),
    ("random", "phase=always"),
)


def stacks() -> dict[str, Stack]:
    """Every member of conf/compress, at a budget of half where it has one, and some combinations."""
    found = {}
    for name, *changes in [*((name,) for name in conf_tree.members("compress")), *MORE]:
        half = ["keep.budget.value=0.5"] if conf_tree.stack(name).keep else []
        found[" ".join((name, *changes))] = conf_tree.stack(name, *half, *changes)
    return found


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """A model over two devices as a device map places it: the first layers here, the last layers and the head there."""
    from accelerate import dispatch_model

    n = len(model.get_decoder().layers)
    places = {f"model.layers.{i}": FIRST if i < n - n // 2 else SECOND for i in range(n)}
    head = FIRST if model.config.tie_word_embeddings else SECOND
    places |= {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.norm": SECOND, "lm_head": head}
    found: PreTrainedModel = dispatch_model(
        model, device_map={name: str(place) for name, place in places.items()}, main_device=str(FIRST)
    )
    return found


def trial(engine: Engine, all_stacks: Mapping[str, Stack]) -> dict[str, Any]:
    """What came of everything, by name; a value or the reason of a refusal or failure."""
    found: dict[str, Any] = {}
    for name, one in _asked(engine, all_stacks):
        found[name] = _result(one)
    answered = {n: found[f"answer {n}"]["row"] for n in all_stacks if found[f"answer {n}"]["status"] == "ok"}
    asks = [Ask(row=row, held=ids(2 + k % 3, k), max_new=2) for k, row in enumerate(answered.values())]
    for name, answer in zip(answered, engine.answer(asks), strict=True):
        found[f"second question {name}"] = (answer.ids, answer.peak, _facts(answer.row))
    for name in all_stacks:
        found[f"answer {name}"]["row"] = None
    texts = (Window(ids=tuple(ids(66, 3)), scored=65), Window(ids=tuple(ids(9, 4)), scored=8))
    documents = (
        [LmEvalRequest(kind="loglikelihood_rolling", windows=texts)],
        [LmEvalRequest(kind="loglikelihood", ids=tuple(ids(40, 5)), target=tuple(ids(n, 6))) for n in (1, 4)],
    )
    for number, requests in enumerate(documents):
        for name, reply in zip(all_stacks, asking.document(engine, requests, list(all_stacks.values()), LIMIT), strict=True):
            answered = reply.responses if reply.status == "ok" else None
            found[f"lm-eval {number} {name}"] = (reply.status, reply.error, answered, reply.exercised)
    found["codec limits"] = measure(engine, [ids(60, 7), ids(40, 8)], 99.0)
    found["retrieval heads"] = copy_scores(engine, [1], Calibration(tokens=24, repeats=2))
    return found


def _asked(engine: Engine, all_stacks: Mapping[str, Stack]) -> Iterator[tuple[str, Result[str]]]:
    """Answers, choices and streams under every stack, through the scheduler."""
    context = tuple(ids(CONTEXT, 1))
    longer, text = (*context, *ids(3, 2)), tuple(ids(50, 3))
    requests: list[Request[str]] = []
    for k, (name, stack) in enumerate(all_stacks.items()):
        common: dict[str, Any] = {"stack": stack, "seed": 7}
        held = tuple(ids(1 + k % 4, k))
        requests.append(Question(owner=f"answer {name}", prefix=context, held=held, max_new=3, **common))
        choices = (tuple(ids(1, 9)), tuple(ids(3, 10)))
        requests.append(Question(owner=f"choices {name}", prefix=context, held=held, targets=choices, **common))
        requests.append(Stream(owner=f"stream of 1 {name}", prefix=context, ids=longer, chunk=1, **common))
        requests.append(Stream(owner=f"stream of 25 {name}", prefix=(), ids=text, chunk=25, **common))
    requests.sort(key=lambda one: (type(one).__name__, one.shared))  # neighbours share what is read
    for name, one in asking.owned(engine, requests, LIMIT).items():
        yield name, one


def _result(one: Result[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"status": one.status, "error": one.error, "trace": one.trace, "row": one.row}
    if one.status != "ok":
        return found
    if one.read is not None:
        series = {name: one.read.curve(name).tolist() for name in ("nll", "kl", "agree")}
        return found | series | {"errors": one.read.errors, "peak": one.read.peak, "end": _facts(one.read.row)}
    marks = [(s.logp, s.greedy, s.sound) for s in one.scored]
    answer = one.answer and (one.answer.ids, one.answer.touched)
    return found | {"peak": one.peak, "marks": marks, "answer": answer, "start": _facts(one.start), "end": _facts(one.final)}


def _facts(row: SequenceCache) -> dict[str, Any]:
    """What records say of a cache, and which tokens it holds."""
    kept = [[head.tolist() for head in layer] for layer in row.kept_positions()]
    return {"kept": kept, "touched": row.touched(), "codecs": row.codec_info(), "bytes": row.bytes(), "storage": row.storage}


def differences(host: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, str]:
    """Results that are not the same, bit for bit, with what the device said of an error."""
    odd = {}
    for name, wanted in host.items():
        got = device.get(name)
        if not _same(wanted, got):
            trace = got.get("trace", "") if isinstance(got, dict) else ""
            odd[name] = trace[-900:] or f"{got!s:.300} is not {wanted!s:.300}"
    return odd


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a if key != "row")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def failures(found: Mapping[str, Any]) -> Sequence[str]:
    """Results that failed: a refusal is a rule, a failure is a mistake."""
    return [name for name, one in found.items() if isinstance(one, dict) and one.get("status") == "failed"]
