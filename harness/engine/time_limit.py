"""A time limit on what an engine does at once, checked before every layer of every forward.

Nothing is interrupted from outside: no signal, no thread. So a limit holds wherever the model runs (any launcher, any
thread), and code that never comes back to the model, such as a scorer that waits for ever, is only noticed afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from harness.engine.answers import Answer, Ask, Prefix, Scored, Step
from harness.engine.engine import Engine
from harness.kv.batch_views import Batch
from harness.kv.memory import Budget
from harness.kv.sequence_cache import SequenceCache
from harness.stages.protocols import Needs
from harness.stages.stack import Stack


class TimeLimitError(RuntimeError):
    """A prefill or a batch took longer than allowed; a batch is then halved, so that only requests slow by themselves fail."""


class TimedEngine(Engine):
    """An engine whose every call, or everything inside one `limit()`, takes at most `seconds`."""

    def __init__(
        self, model: PreTrainedModel, kv_dtype: torch.dtype, eos: Sequence[int], seconds: float, *, invariant: bool = False
    ) -> None:
        super().__init__(model, kv_dtype, eos, invariant=invariant)
        self.seconds = seconds
        self._end: float | None = None

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Start the clock; inside another limit this one changes nothing."""
        if self._end is not None:
            yield
            return
        self._end = time.monotonic() + self.seconds
        lists = [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
        hooks = [layer.register_forward_pre_hook(self._check) for layers in lists for layer in layers]
        try:
            yield
            self._check()
        finally:
            self._end = None
            for hook in hooks:
                hook.remove()

    def _check(self, *_: Any) -> None:
        if self._end is not None and time.monotonic() > self._end:
            raise TimeLimitError(f"longer than time_limit={self.seconds:g} s")

    def prefill(self, ids: Sequence[int], needs: Needs = Needs(), length: int = 0) -> Prefix:  # noqa: B008 frozen
        with self.limit():
            return super().prefill(ids, needs, length)

    def compress(self, prefix: Prefix, stack: Stack, seed: int = 0, solved: Budget | None = None) -> SequenceCache:
        with self.limit():
            return super().compress(prefix, stack, seed, solved)

    def score(
        self, caches: Sequence[SequenceCache], held: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[Scored]:
        with self.limit():
            return super().score(caches, held, targets)

    def read(
        self,
        caches: Sequence[SequenceCache],
        ids: Sequence[Sequence[int]],
        reference: Sequence[int] | None = None,
        batch: Batch | None = None,
        beside: Sequence[tuple[SequenceCache, int]] = (),
    ) -> Step:
        with self.limit():
            return super().read(caches, ids, reference, batch, beside)

    def read_chunked(self, ids: Sequence[int], caches: Sequence[SequenceCache]) -> list[tuple[SequenceCache, int]]:
        with self.limit():
            return super().read_chunked(ids, caches)

    def answer(self, asks: Sequence[Ask], views: int = 0) -> list[Answer]:
        with self.limit():
            return super().answer(asks, views)


def limited(engine: Engine) -> AbstractContextManager[None]:
    """One time limit over several calls of an engine, where it has one."""
    return engine.limit() if isinstance(engine, TimedEngine) else nullcontext()
