"""Slow oracles of eviction after every forward; they know no store, no codec and no model.

A run is a prefill and then steps of one or more new tokens. A forward attends to the tokens kept so far and to its own new
tokens, causally by original position; eviction follows it, back to a token budget that never changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.support.oracles.keep import Kept, Step, default_recent, keep_rows, knorm_scores, last_query_mean, row_weights


def run_streaming_steps(lengths: Sequence[int], budget: int, sinks: int, heads: int = 1) -> list[Step]:
    """StreamingLLM at original positions: lengths are the new tokens of each forward, the first is the prompt."""
    out, rows, seen = [], list[int](), 0
    for new in lengths:
        rows += range(seen, seen + new)
        seen += new
        rows = [rows[n] for n in keep_rows([0.0] * len(rows), len(rows), budget, sinks, budget - sinks)]
        out.append(Step([list(rows) for _ in range(heads)], []))
    return out


def run_h2o_steps(
    q_steps: Sequence[Tensor],
    k_all_HTD: Tensor,
    budget: int,
    sinks: int = 0,
    recent: int | None = None,
    k_stored_HTD: Tensor | None = None,
    window: int | None = None,
) -> list[Step]:
    """H2O: scores grow by the mean over the group of what the new queries give; an evicted token loses its score.

    Args:
        q_steps: rotated queries of each forward, [Q, L, D]; the first is the prompt's.
        k_all_HTD: rotated exact keys of all tokens of the run.
        budget: tokens per KV head, fixed.
        sinks: first tokens never evicted.
        recent: last tokens never evicted; None: half the budget after sinks.
        k_stored_HTD: what a token reads as in the forwards after its own (decoded keys); None: the exact keys.
        window: sliding window of the layer's attention, if any.
    """
    recent = default_recent(budget, sinks) if recent is None else recent
    heads = k_all_HTD.shape[0]
    rows: Kept = [[] for _ in range(heads)]
    scores: list[dict[int, float]] = [{} for _ in range(heads)]
    out, seen = [], 0
    for q_QLD in q_steps:
        group, new = q_QLD.shape[0] // heads, range(seen, seen + q_QLD.shape[1])
        for h in range(heads):
            at = rows[h] + list(new)
            keys = read_keys(k_all_HTD[h], None if k_stored_HTD is None else k_stored_HTD[h], at, seen)
            total = {p: scores[h].get(p, 0.0) for p in at}
            for i in range(h * group, (h + 1) * group):
                for t in new:
                    given = row_weights(q_QLD[i, t - seen], keys, t, at, window)
                    for p, weight in zip(at, given, strict=True):
                        total[p] += weight / group
            kept = keep_rows([total[p] for p in at], len(at), budget, sinks, recent)
            rows[h] = [at[n] for n in kept]
            scores[h] = {p: total[p] for p in rows[h]}
        seen = new.stop
        out.append(Step([list(r) for r in rows], [[scores[h][p] for p in rows[h]] for h in range(heads)]))
    return out


def run_tova_steps(
    q_steps: Sequence[Tensor],
    k_all_HTD: Tensor,
    budget: int,
    k_stored_HTD: Tensor | None = None,
    window: int | None = None,
) -> list[Step]:
    """TOVA: after each forward the budget's best by the last query's weights over kept and new tokens; one set per layer.

    Arguments as in `run_h2o_steps`; the scores of a step are its weights, nothing is carried over.
    """
    heads = k_all_HTD.shape[0]
    rows: list[int] = []
    out, seen = [], 0
    for q_QLD in q_steps:
        stop = seen + q_QLD.shape[1]
        at = rows + list(range(seen, stop))
        stored = [None] * heads if k_stored_HTD is None else list(k_stored_HTD)
        keys = [read_keys(k_all_HTD[h], stored[h], at, seen) for h in range(heads)]
        weights = last_query_mean(q_QLD[:, -1], keys, stop - 1, at, window)
        kept = keep_rows(weights, len(at), budget, 0, 0)
        rows = [at[n] for n in kept]
        seen = stop
        out.append(Step([list(rows) for _ in range(heads)], [[weights[n] for n in kept] for _ in range(heads)]))
    return out


def run_knorm_steps(
    lengths: Sequence[int], k_all_HTD: Tensor, budget: int, sinks: int = 0, recent: int | None = None
) -> list[Step]:
    """Key norm after every forward; lengths as in `run_streaming_steps`, norms are those of k_all_HTD."""
    recent = default_recent(budget, sinks) if recent is None else recent
    norms = knorm_scores(k_all_HTD)
    rows: Kept = [[] for _ in norms]
    out, seen = [], 0
    for new in lengths:
        for h, score in enumerate(norms):
            at = rows[h] + list(range(seen, seen + new))
            rows[h] = [at[n] for n in keep_rows([score[p] for p in at], len(at), budget, sinks, recent)]
        seen += new
        out.append(Step([list(r) for r in rows], [[norms[h][p] for p in r] for h, r in enumerate(rows)]))
    return out


def read_keys(k_TD: Tensor, stored_TD: Tensor | None, at: Sequence[int], seen: int) -> list[Tensor]:
    """Keys a forward reads: exact for its own tokens (position >= seen), as stored for the older ones."""
    return [k_TD[p] if stored_TD is None or p >= seen else stored_TD[p] for p in at]
