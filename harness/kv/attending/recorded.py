"""The statistics that rows ask a forward for, taken from the queries and keys of a call of attention."""

from __future__ import annotations

from torch import Tensor

from harness.kv.attending.call import Call, Part
from harness.kv.attention_stats import column_sums, query_moments, step_sums
from harness.kv.token_store import own
from harness.stages.protocols import Stats


def record(call: Call, part: Part, q: Tensor, k: Tensor) -> None:
    """Keep in the forward what each row asked for, of its queries q [R, Q, L, D] and all its keys k [R, H, N + L, D]."""
    run = call.run
    needs = [run.needs[row] for row in part.rows]
    sums = _sums(call, part, [i for i, need in enumerate(needs) if need.column_sums], q, k)
    for i, (row, need) in enumerate(zip(part.rows, needs, strict=True)):
        if not need:
            continue
        queries = q[i, :, -need.queries :] if need.queries else None
        if queries is not None and q.shape[2] > 1:
            queries = own(queries)  # they outlive a prefill; those of a step go with it
        rope, start = run.query_rope(call.seat.layer), run.start(row)
        mean, cov = query_moments(q[i], rope, start) if need.query_moments else (None, None)
        run.stats[call.seat.layer][row] = Stats(sums.get(i), queries, call.scaling, mean, cov, part.softmax)


def _sums(call: Call, part: Part, wanted: list[int], q: Tensor, k: Tensor) -> dict[int, Tensor]:
    """Column sums of those of the rows that want them; a step's are made in one go."""
    if not wanted:
        return {}
    softmax, pos_RHN = part.softmax, part.pos_RHN
    if q.shape[2] == 1:
        pos = None if pos_RHN is None else call.run.pick(pos_RHN, wanted)
        scaled, stored = _scaled(call, part, wanted, q, k), call.run.pick(k, wanted)
        calls = call.run.calls(wanted)
        parts = (step_sums(scaled[at], stored[at], softmax, None if pos is None else pos[at]) for at in calls)
        found = [one for sums_RHN in parts for one in sums_RHN]
    else:  # summed block by block, and the size of a block must be the row's own affair
        each = [None] * len(part.rows) if pos_RHN is None else list(pos_RHN)
        found = [column_sums(q[i], k[i], call.scaling, softmax, each[i]) for i in wanted]
    if call.seat.latent is not None:
        found = [x.mean(0, keepdim=True) for x in found]
    return dict(zip(wanted, found, strict=True))


def _scaled(call: Call, part: Part, wanted: list[int], q: Tensor, k: Tensor) -> Tensor:
    """The single new query of these rows times the scaling, [R, Q, D], for the heads of the part."""
    heads, group = part.heads if call.seat.latent is None else slice(0, k.shape[1]), q.shape[1] // k.shape[1]
    scaled_RQD = call.run.pick(call.scaled_BQD, [part.rows[i] for i in wanted])
    return scaled_RQD[:, heads.start * group : heads.stop * group]
