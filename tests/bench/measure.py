"""Shared by the benchmark scripts: the default model, its prompts, and timing by the best of interleaved repetitions."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hydra
import torch
from omegaconf import OmegaConf
from transformers import DynamicCache

from harness.configure.arms import Arm, arms_of
from harness.configure.typed import build
from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.kv.compat import forward
from harness.models.load import LM, load

CONF = str(Path(__file__).parents[2] / "conf")
ALL_VIEWS = 1 << 40  # bytes: decoded copies of all stores
torch.set_num_threads(1)


def setup(*overrides: str) -> tuple[LM, list[Arm]]:
    """The default model and the cells of a configuration."""
    with hydra.initialize_config_dir(CONF, version_base="1.3"):
        cfg = hydra.compose("config", overrides=list(overrides))
        found = arms_of(cfg, list(overrides))
        return load(build(OmegaConf.to_container(cfg.model), "model"), NAME), found


def engine(lm: LM, kv_dtype: torch.dtype | None = None, *, invariant: bool = False) -> Engine:
    """An engine without end tokens: every row decodes the same number of steps. invariant: as `batch_invariant` of a run."""
    return Engine(lm.model, kv_dtype or lm.kv_dtype, (), invariant=invariant)


@contextmanager
def stock(lm: LM) -> Iterator[None]:
    """Inside, the model attends as transformers does."""
    lm.model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        lm.model.set_attn_implementation(NAME)


@torch.inference_mode()
def stock_batch(lm: LM, ids: list[int], rows: int) -> DynamicCache:
    """transformers' own cache of a context that is read once, repeated for so many rows; inside `stock`."""
    cache = DynamicCache(config=lm.model.config)
    forward(lm.model, torch.tensor([ids]), torch.arange(len(ids))[None], cache, [len(ids) - 1])
    cache.batch_repeat_interleave(rows)
    return cache


def prose(lm: LM, n: int, skip: int = 0) -> list[int]:
    """n tokens of the King James text."""
    from tasks.corpus import KingJames

    with hydra.initialize_config_dir(CONF, version_base="1.3"):
        corpus: KingJames = hydra.utils.instantiate(hydra.compose("config").corpus)
    return lm.tokens.encode("\n".join(corpus.documents())[: (skip + n) * 6])[skip : skip + n]


def best(
    functions: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Best time of each function by a clock; repetitions are interleaved, so that a slow minute hits all alike."""
    times: dict[str, float] = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            start = clock()
            function()
            times[name] = min(times[name], clock() - start)
    return times


def products(lm: LM, rows: int, repeats: int = 5) -> float:
    """Seconds of CPU time that the products with all of the model's weights take for a number of rows: the part of a forward
    that sequences in one batch share. What `rows` rows cost together against one by one bounds what lockstep can save."""
    matrices = [m for m in lm.model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {width: torch.randn(rows, width, dtype=lm.model.dtype) for width in {m.in_features for m in matrices}}

    def once() -> None:
        with torch.inference_mode():
            for m in matrices:
                torch.nn.functional.linear(inputs[m.in_features], m.weight)

    once()
    return best({"products": once}, repeats, time.process_time)["products"]
