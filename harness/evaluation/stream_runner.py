"""Stream tasks: perplexity, fidelity and curves of documents read chunk by chunk under every arm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from harness.configure.arms import Arm
from harness.engine.logits import IMPOSSIBLE, NEVER, UNSOUND, UNSOUND_FULL
from harness.engine.requests import Request, Result
from harness.engine.requests import Stream as StreamRequest
from harness.engine.streams import Floats, Read
from harness.evaluation.planned import Planned, Setup, plan
from harness.evaluation.record_fields import Fields
from harness.evaluation.record_maker import RecordMaker, breakdown
from harness.models.load import LM
from harness.records.store import Store
from harness.types import Example, Record
from tasks.stream import Stream

NOT_READ = (
    "nothing was compressed before the last token was scored: the stream is not longer than one task.chunk and what the stack "
    "keeps exactly"
)
ONCE = (
    "this stack chooses tokens once (phase prefill), which a stream without a context never asks for: legal are "
    "compress.phase=always where its scorer allows it, or task.context > 0"
)
LOOKS = (
    "this stack's codec looks at the last queries of a context once, which a stream without a context does not have: legal is "
    "task.context > 0"
)

TOO_LARGE = "it is too large for a number"
MOST_NATS = 709.0  # e to more is no double


class StreamRunner:
    """Makes the records of a stream task, and a file of curves beside each."""

    def __init__(self, lm: LM, task: Stream, setup: Setup, store: Store[Planned]) -> None:
        self.lm, self.task, self.setup, self.store = lm, task, setup, store
        self.maker = RecordMaker(task, setup)
        self.vocabulary = int(lm.model.config.get_text_config().vocab_size)

    def pending(self, examples: Sequence[Example], arms: Sequence[Arm], seed: int) -> list[Planned]:
        """The records that all documents under all arms are."""
        prompts = [(e, self.lm.tokens.prompt(e.context, "", "", chat=False)) for e in examples]
        planned = plan(self.setup, self.task, prompts, arms, seed, self._shared)
        return [replace(one, refusal=self._refusal(one.arm)) for one in planned]

    def _shared(self, example: Example) -> Fields:
        return {
            "higher_is_better": False,
            "aggregate": "exp_weighted",
            "chance": float(self.vocabulary),
            "chunk": self.task.chunk,
        }

    def _refusal(self, arm: Arm) -> str | None:
        if self.task.context:
            return None
        if arm.stack.keys.needs:
            return LOOKS
        return ONCE if arm.stack.keep is not None and arm.stack.phase == "prefill" else None

    def requests(self, planned: Iterable[Planned]) -> Iterator[Request[Planned]]:
        """One request a record."""
        for one in planned:
            ids = one.prompt.ids
            yield StreamRequest(
                owner=one,
                prefix=ids[: self.task.context],
                ids=ids,
                stack=one.arm.stack,
                chunk=self.task.chunk,
                seed=int(one.prompt.sha256[:12], 16),
            )

    def record(self, planned: Planned, results: Sequence[Result[Planned]]) -> Record:
        """The record of a text that was read to its end."""
        (result,) = results
        assert result.read is not None
        out, cache = result.read, result.read.row
        nll = out.curve("nll")
        if not out.sound or np.isinf(nll).any():
            return self.maker.record(planned, status="failed", error=NEVER if out.sound else UNSOUND)
        nothing = cache.stack.compresses and out.compressed == 0
        held = [n for layer in cache.held() for n in layer]
        metrics, missing = self._metrics(planned.prompt.ids, out, nll)
        return self.maker.record(
            planned,
            status="not_exercised" if nothing else "ok",
            error=NOT_READ if nothing else None,
            score=float(nll.mean()),
            weight=float(len(nll)),
            metrics=metrics,
            missing=missing,
            compressed_share=out.compressed_share if cache.stack.compresses else None,
            rope_length=cache.length,
            tokens_seen=cache.seen,
            tokens_kept=sum(held) / len(held),
            entries_touched=cache.touched(),
            codec_info=cache.codec_info(),
            kv_bytes_context=round(out.mean_bytes),
            kv_bytes_final=cache.bytes().total,
            kv_bytes_peak=out.peak,
            kv_bytes_peak_prefill=result.peak_prefill or out.peak,  # without a context all of it is read as it comes
            storage=cache.storage,
            layer_budget=cache.layer_budget,
            kv_bytes_full=round(out.mean_full_bytes),
            kv_bytes_full_final=self.setup.shape.full_bytes(cache.seen, cache.itemsize),
            reach=self.setup.shape.reach(cache.seen, cache.itemsize),
            bytes=breakdown(cache.bytes()),
            series_path=self._series(planned, nll, out),
            timings=result.timings,
        )

    def finish(self, planned: Sequence[Planned]) -> None:
        """Records and their curves are all there is."""

    def _metrics(self, ids: Sequence[int], out: Read, nll: Floats) -> tuple[dict[str, float], dict[str, str]]:
        """The numbers beside perplexity; and, for those that cannot be had, why."""
        scored_text = self.lm.tokens.decode(ids[max(self.task.context, 0) + 1 :])
        ratios = [math.sqrt(num / den) if den else 0.0 for num, den in out.errors.tolist()]
        found = {
            "perplexity": math.exp(nll.mean()) if nll.mean() < MOST_NATS else math.inf,
            "nll_per_byte": float(nll.sum()) / len(scored_text.encode()),
            "kl_to_full": float(out.curve("kl").mean()),
            "top1_agreement": float(out.curve("agree").mean()),
            "attention_error": float(np.mean(ratios)),
            "scored_tokens": float(len(nll)),
        }
        found |= {f"attention_error_layer_{i}": r for i, r in zip(self.setup.shape.attending, ratios, strict=True)}
        against_full = {n for n in found if n.startswith(("kl_", "top1_", "attention_"))}
        missing = {n: IMPOSSIBLE if n == "kl_to_full" else TOO_LARGE for n, x in found.items() if not math.isfinite(x)}
        missing |= {n: UNSOUND_FULL for n in against_full if not out.reference_sound}
        return {name: x for name, x in found.items() if name not in missing}, dict(sorted(missing.items()))

    def _series(self, planned: Planned, nll: Floats, out: Read) -> str:
        """Write the token-by-token curves beside the records; returns the path relative to the run folder."""
        path = Path("series") / f"{planned.key[:16]}.parquet"
        first = len(planned.prompt.ids) - len(nll)
        frame = pd.DataFrame(
            {"position": np.arange(first, first + len(nll), dtype=np.int32), "nll": nll, "kl": out.curve("kl")}
        )
        self.store.write(path, frame.to_parquet)
        return str(path)
