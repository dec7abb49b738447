"""One family on trial: a tiny model of it read through our stores, beside the same model read by transformers alone.

Three comparisons, all in fp32: everything kept equals transformers' own cache, tokens evicted equal tokens masked, and the
bytes of the full cache are those that transformers' own cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.families import oracle
from harness.families.tiny import VOCABULARY, build, tiny_config
from harness.kv.attention import NAME
from harness.kv.compat import shape_of
from harness.kv.sequence_cache import SequenceCache
from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.score.knorm import KeyNorm
from harness.stages.score.recency import Recency
from harness.stages.stack import Stack

Calls = Sequence[tuple[Tensor, Cache]]  # last logits after each call, and transformers' own cache
HONOURED, PARTLY, REFUSED, NOT_BUILT, WRONG = "honoured", "partly", "refused", "not built", "wrong"
CALLS = (40, 9, 1, 1)  # tokens of a prompt beyond every tiny window, of a chunk, of two steps
CONTEXT, BUDGET, QUESTION, STEPS = 60, 24, 5, 3
EQUAL = 1e-6  # of the largest logit, everything kept: what another kernel than transformers' may differ by
MASKED = 1e-5  # the same for evicted tokens, which the oracle masks in an attention written in another way
POWER = 1e-3  # masking must move the logits by a hundred times that, or the comparison shows nothing
ONLY_WINDOWS = "all its layers slide: their windows are stored exactly, and no token is evicted"


@dataclass(frozen=True)
class Verdict:
    """What became of a family.

    difference: with everything kept to transformers, of the largest logit; 0: every bit is equal. layers: those that stacks
    compress, of all that attend. positions_cache: whether keys can be stored without rotation.
    """

    family: str
    status: str
    reason: str = ""
    difference: float | None = None
    layers: str = ""
    cached_bytes: int | None = None
    positions_cache: bool | None = None


def try_family(family: str) -> Verdict:
    """Never raises: what fails where it must not is the verdict `wrong`, with the error as the reason."""
    try:
        config = tiny_config(family)
        stock = _stock(config)
    except Exception as error:
        return Verdict(family, NOT_BUILT, _line(error))
    try:
        shape_of(stock.config)
        try:
            expected = list(_read(stock))
        except Exception as error:
            return Verdict(family, NOT_BUILT, f"transformers' own cached forward of a tiny one fails: {_line(error)}")
        return _tried(family, config, stock, expected)
    except UserError as error:
        return Verdict(family, REFUSED, str(error).split(" is not supported: ", 1)[-1])
    except Exception as error:
        return Verdict(family, WRONG, _line(error))


def _tried(family: str, config: PretrainedConfig, stock: PreTrainedModel, expected: Calls) -> Verdict:
    engine = Engine(build(config, NAME, stock.state_dict()), torch.float32)
    away = _kept(engine, [logits for logits, _ in expected])
    found = Verdict(
        family,
        HONOURED if engine.shape.full_layers else PARTLY,
        "" if engine.shape.full_layers else ONLY_WINDOWS,
        away,
        f"{len(engine.shape.full_layers)} of {len(engine.shape.attending)}",
        _cached(expected[-1][1]),
        None not in engine.ropes,
    )
    problems = [*_unequal(away), *_uncounted(engine, found.cached_bytes), *_evicted(engine, config, stock)]
    return Verdict(family, WRONG, "; ".join(problems), away) if problems else found


def _stock(config: PretrainedConfig) -> PreTrainedModel:
    """The model as transformers runs it: its own sdpa, or its eager attention where it has no sdpa."""
    try:
        return build(config, "sdpa")
    except ValueError:
        return build(config, "eager")


def _ids(n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()
    return found


@torch.inference_mode()
def _read(model: PreTrainedModel) -> Iterator[tuple[Tensor, Cache]]:
    """Last logits [V] after each of the calls, and transformers' own cache then."""
    cache, seen = None, 0
    for n in CALLS:
        logits, cache = oracle.alone(model, _ids(n, n), seen, cache)
        yield logits, cache
        seen += n


def _kept(engine: Engine, expected: list[Tensor]) -> float:
    """The largest difference to the expected logits, of their largest, when everything is kept."""
    cache, worst = engine.start(length=sum(CALLS)), 0.0
    for n, wanted in zip(CALLS, expected, strict=True):
        (cache,), logits = engine.feed([cache], [_ids(n, n)])
        worst = max(worst, _difference(logits[0], wanted))
    return worst


def _difference(found: Tensor, wanted: Tensor) -> float:
    away = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
    return away if math.isfinite(away) else math.inf  # NaN is greater than nothing


def _unequal(away: float) -> list[str]:
    return [] if away <= EQUAL else [f"with everything kept its logits differ from transformers' by {away:.1e}"]


def _cached(cache: Cache) -> int:
    """Bytes that transformers' own cache holds."""
    cache = getattr(cache, "self_attention_cache", cache)
    held = (x for one in (cache, *cache.layers) for value in vars(one).values() for x in _tensors(value))
    return sum({x.data_ptr(): x.numel() * x.element_size() for x in held if x.numel()}.values())


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _uncounted(engine: Engine, cached: int | None) -> list[str]:
    counted = engine.shape.full_bytes(sum(CALLS), 4)
    return [] if counted == cached else [f"its full cache counts {counted} bytes, transformers' own holds {cached}"]


@torch.inference_mode()
def _evicted(engine: Engine, config: PretrainedConfig, stock: PreTrainedModel) -> list[str]:
    """What is wrong when tokens are evicted once, and after every step."""
    if not engine.shape.full_layers:
        return []
    problems = []
    scorer, sinks = (KeyNorm(), 0) if oracle.by_head(config) else (Recency(), 4)  # under one mask the same tokens of all heads
    for phase in ("prefill", "always"):
        keep = Keep(scorer=scorer, budget=Amount(unit="tokens", value=BUDGET), sinks=sinks)
        cache = engine.compress(
            engine.prefill(_ids(CONTEXT, 0), length=CONTEXT + QUESTION + STEPS), Stack(keep=keep, phase=phase)
        )
        model = oracle.masked_model(config, stock.state_dict())
        masked, plain = oracle.MaskedModel(model), oracle.MaskedModel(model)
        for one in (masked, plain):
            one.feed(_ids(CONTEXT, 0), {})
        tokens, worst, moved = _ids(QUESTION, 1), 0.0, 0.0
        for _ in range(STEPS):
            wanted = masked.feed(tokens, _readable(engine, cache))
            moved = max(moved, _difference(plain.feed(tokens, {}), wanted))
            (cache,), logits = engine.feed([cache], [tokens])
            worst = max(worst, _difference(logits[0], wanted))
            tokens = [int(wanted.argmax())]
        if worst > MASKED:
            problems.append(
                f"with tokens evicted (phase {phase}) its logits differ from those with tokens masked by {worst:.1e}"
            )
        if moved < POWER:
            problems.append(f"masking tokens (phase {phase}) moves its logits by {moved:.1e} only: nothing is shown")
    return problems


def _readable(engine: Engine, cache: SequenceCache) -> dict[int, Sequence[Tensor]]:
    """What each full layer of the model may read, by its number: its own store, or that of the layer whose store it reads."""
    shape, kept = engine.shape, cache.kept_positions()
    found: dict[int, Sequence[Tensor]] = {n: kept[i] for n, i in shape.places.items() if i in shape.full_layers}
    return found | {number: kept[i] for number, i in shape.readers if i in shape.full_layers}


def _line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:160]}"
