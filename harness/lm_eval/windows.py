"""The log-likelihood of a whole text under many stacks. It knows token ids only.

A text scored as a whole has no context that could be compressed first. So each window is read in two parts: the first half
exactly (every stack gives the same numbers there), then it is compressed, and the second half is fed through the compressed
store in chunks, each token predicted by a forward that reads the store. How many tokens that are is part of the result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from harness.engine.answers import Scored
from harness.engine.batches import Forecast, fill, run_halving
from harness.engine.engine import Engine
from harness.engine.logits import UNSOUND, sound
from harness.engine.requests import Request, Result, ended, failed, lot, refused
from harness.engine.scheduler import needs_of
from harness.engine.streams import context_row
from harness.engine.time_limit import limited
from harness.kv.sequence_cache import SequenceCache
from harness.lm_eval.encoding import Window
from harness.stages.stack import Stack

CHUNK = 32  # tokens fed to a compressed store at once
EXACT_CHUNK = 256  # tokens of the exact part at once: bounds the logits held
SHORTEST = 64  # ids; a shorter window is read exactly, whatever the stack


@dataclass
class WindowServed:
    """A text under one stack: log-probability of its scored tokens, whether all were the most likely ones, and how many
    tokens were scored, and predicted from a store that had lost something. `served` is of the first window.
    """

    served: Result
    logp: float = 0.0
    greedy: bool = True
    scored: int = 0
    exercised: int = 0


@dataclass
class _Tokenwise:
    """Log-probabilities of consecutive tokens of a window, and whether each was the most likely one, and was predicted from a
    store that had lost something; sound: whether all logits were distributions.
    """

    row: SequenceCache
    logp: list[float] = field(default_factory=list)
    top: list[bool] = field(default_factory=list)
    peak: int = 0  # bytes with a chunk joined, before rows were evicted
    compressed: list[bool] = field(default_factory=list)
    sound: bool = True


class WindowReader:
    """Reads windows through an engine, all stacks of a text in lockstep under a memory limit."""

    def __init__(self, engine: Engine, forecast: Forecast, memory_limit: int) -> None:
        self.engine, self.forecast, self.limit = engine, forecast, memory_limit

    def read(self, windows: Sequence[Window], stacks: Sequence[Stack]) -> list[WindowServed]:
        """One result a stack; a stack that is refused or fails in one window is so as a whole."""
        out = [WindowServed(Result(job=Request(prefix=(), stack=stack, held=()))) for stack in stacks]
        for number, window in enumerate(windows):
            left = [one for one in out if one.served.status == "ok"]
            try:
                self._window(window, left, first=number == 0)
            except Exception as error:  # reading the exact part failed: no stack has an answer
                for one in left:
                    one.served = ended(one.served.job, error)
        return out

    def _window(self, window: Window, results: Sequence[WindowServed], *, first: bool) -> None:
        ids = window.ids
        half = len(ids) // 2 if len(ids) >= SHORTEST else len(ids) - 1
        with limited(self.engine):
            start = self._tokens([self.engine.start(length=len(ids) - 1)], ids[: half + 1], EXACT_CHUNK)[0]
        if not start.sound:
            raise ArithmeticError(UNSOUND)
        if half == len(ids) - 1:
            for one in results:
                _add(one, window, start, _Tokenwise(start.row))
                if first:
                    one.served = _served(one.served, start.row, start, 0.0)
            return
        ready = self._compressed(ids[:half], results, len(ids) - 1)
        for wave in fill(ready, lambda one, _: self._size(one[1], len(ids)), self.limit):
            begin = time.perf_counter()
            outcomes = run_halving(lambda part: self._rest(part, ids), wave, _failure, _refusal)
            seconds = time.perf_counter() - begin
            for (one, row), outcome in zip(wave, outcomes, strict=True):
                if isinstance(outcome, Result):
                    one.served = outcome
                    continue
                if not outcome.sound:
                    one.served = failed(one.served, UNSOUND, "")
                    continue
                _add(one, window, start, outcome)
                if first:
                    one.served = _served(one.served, row, outcome, seconds, len(wave))

    def _compressed(
        self, ids: Sequence[int], results: Sequence[WindowServed], length: int
    ) -> list[tuple[WindowServed, SequenceCache]]:
        """The exact first part and a row of it for every stack that takes it; the others are refused."""
        prefix = self.engine.prefill(ids, needs_of(one.served.job.stack for one in results), length)
        ready: list[tuple[WindowServed, SequenceCache]] = []
        for one in results:
            try:
                row, peak = context_row(self.engine, prefix, ids, one.served.job.stack, lot(ids))
                if one.served.row is None:  # bytes are those of the first window
                    one.served = replace(one.served, peak_prefill=peak)
                ready.append((one, row))
            except Exception as error:
                one.served = ended(one.served.job, error)
        return ready

    def _size(self, row: SequenceCache, total: int) -> int:
        return self.forecast.row(row.stack, row.seen, total - row.seen) + 3 * CHUNK * 4 * self.forecast.vocabulary

    def _rest(self, part: Sequence[tuple[WindowServed, SequenceCache]], ids: Sequence[int]) -> list[_Tokenwise | Result]:
        with limited(self.engine):
            return [*self._tokens([row for _, row in part], ids, CHUNK)]

    def _tokens(self, rows: Sequence[SequenceCache], ids: Sequence[int], chunk: int) -> list[_Tokenwise]:
        """Feed rows that have seen equally much the rest of `ids`, each token predicting the next."""
        out = [_Tokenwise(row) for row in rows]
        seen = rows[0].seen
        while seen < len(ids) - 1:
            end = min(seen + chunk, len(ids) - 1)
            step = self.engine.read([one.row for one in out], [ids[seen:end]] * len(out))
            sound_B = sound(step.logits_BLV).all(1).tolist()
            logp_BLV = step.logits_BLV.float().log_softmax(-1)
            wanted_L = torch.tensor(ids[seen + 1 : end + 1], device=logp_BLV.device)
            for one, row, grown, logp_LV, fine in zip(out, step.rows, step.grown_bytes, logp_BLV, sound_B, strict=True):
                one.compressed += [one.row.touched() > 0] * (end - seen)
                one.sound &= fine
                one.row, one.peak = row, max(one.peak, grown)
                one.logp += logp_LV.gather(1, wanted_L[:, None])[:, 0].tolist()
                one.top += (logp_LV.argmax(-1) == wanted_L).tolist()
            seen = end
        return out


def _add(one: WindowServed, window: Window, exact: _Tokenwise, rest: _Tokenwise) -> None:
    logp, top = [*exact.logp, *rest.logp][-window.scored :], [*exact.top, *rest.top][-window.scored :]
    assert len(logp) == window.scored
    one.logp += sum(logp)
    one.greedy &= all(top)
    one.scored += len(logp)
    one.exercised += sum([*exact.compressed, *rest.compressed][-window.scored :])


def _served(served: Result, row: SequenceCache, rest: _Tokenwise, seconds: float, rows: int = 1) -> Result:
    context = row.bytes()
    return replace(
        served,
        row=row,
        context=context,
        peak_prefill=served.peak_prefill or context.total,  # a text read exactly as a whole has no other
        scored=(Scored((), False, rest.row, rest.peak),),
        timings={"wave_s": seconds, "wave_rows": float(rows)},
    )


def _failure(item: tuple[WindowServed, SequenceCache], line: str, trace: str) -> _Tokenwise | Result:
    return failed(item[0].served, line, trace)


def _refusal(item: tuple[WindowServed, SequenceCache], line: str) -> _Tokenwise | Result:
    return refused(item[0].served, line)
