"""A time limit on what an engine does at once, checked before every layer of every forward.

Nothing is interrupted from outside: no signal, no thread. So a limit holds wherever the model runs (any launcher, any
thread), and code that never comes back to the model, such as a scorer that waits for ever, is only noticed afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from transformers import PreTrainedModel

from harness.engine.engine import Engine

Given = ParamSpec("Given")
Made = TypeVar("Made")


class TimeLimitError(RuntimeError):
    """A prefill or a batch took longer than allowed; a batch is then halved, so that only requests slow by themselves fail."""


def _within_limit(call: Callable[Concatenate[Engine, Given], Made]) -> Callable[Concatenate[TimedEngine, Given], Made]:
    """A method of an engine, within the limit of a timed one."""

    @wraps(call)
    def timed(self: TimedEngine, /, *given: Given.args, **named: Given.kwargs) -> Made:
        with self.limit():
            return call(self, *given, **named)

    return timed


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

    def _check(self, *_: object) -> None:
        if self._end is not None and time.monotonic() > self._end:
            raise TimeLimitError(f"longer than time_limit={self.seconds:g} s")

    prefill = _within_limit(Engine.prefill)
    compress = _within_limit(Engine.compress)
    score = _within_limit(Engine.score)
    read = _within_limit(Engine.read)
    read_chunked = _within_limit(Engine.read_chunked)
    answer = _within_limit(Engine.answer)


def limited(engine: Engine) -> AbstractContextManager[None]:
    """One time limit over several calls of an engine, where it has one."""
    return engine.limit() if isinstance(engine, TimedEngine) else nullcontext()
