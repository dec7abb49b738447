"""What a stage of the stack must offer, and what it may see; it knows no model, no cache and no file.

A newcomer extends the project here: one class that satisfies a protocol, one YAML with its `_target_`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Needs:
    """Statistics that a scorer asks the attention function to record.

    column_sums: for every stored row, the sum over all queries so far of the attention it received (mean over the query
        heads of a group), [H, N] fp32. Exact, accumulated in query blocks: costs about a third of a prefill.
    queries: how many of the latest queries (rotated, as used in attention) to keep, [Q, W, D].
    """

    column_sums: bool = False
    queries: int = 0

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.column_sums or other.column_sums, max(self.queries, other.queries))


@dataclass(frozen=True)
class Stats:
    """Statistics recorded in one layer; a field that no stack asked for is None."""

    column_sums_HN: Tensor | None = None
    queries_QWD: Tensor | None = None
    scaling: float = 1.0  # what attention multiplied q.k by


@dataclass(frozen=True)
class LayerView:
    """One layer as a scorer sees it: decoded rows in position order, and the statistics it declared in `needs`."""

    layer: int
    seen: int  # tokens seen so far; the newest stored row stands at seen - 1
    pos_HN: Tensor  # int32 original positions
    stats: Stats
    read_keys: Callable[[], Tensor]
    read_values: Callable[[], Tensor]
    seed: int = 0  # of the example, for scorers that draw lots

    @property
    def n(self) -> int:
        """Rows stored per KV head."""
        return int(self.pos_HN.shape[1])

    @cached_property
    def k_HND(self) -> Tensor:
        """Keys as the store gives them back, fp32; decoded when first asked for."""
        return self.read_keys()

    @cached_property
    def v_HND(self) -> Tensor:
        """Values as the store gives them back, fp32; decoded when first asked for."""
        return self.read_values()

    def window_attention(self, window: int) -> Tensor:
        """Attention weights of the last `window` queries over all rows, [H, W, N] fp32, mean over each query group.

        Queries see each other causally: query i of the window does not see the rows of later queries.
        """
        q_QWD = self.stats.queries_QWD
        assert q_QWD is not None, "the scorer must declare needs.queries"
        q_QWD, k_HND = q_QWD[:, -window:].float(), self.k_HND
        (n_q, w, d), h = q_QWD.shape, k_HND.shape[0]
        q_HGWD = q_QWD.reshape(h, n_q // h, w, d)
        s_HGWN = torch.einsum("hgwd,hnd->hgwn", q_HGWD, k_HND) * self.stats.scaling
        q_pos_W = torch.arange(self.seen - w, self.seen, device=k_HND.device)
        hidden_HWN = self.pos_HN[:, None, :] > q_pos_W[None, :, None]
        s_HGWN = s_HGWN.masked_fill(hidden_HWN[:, None], float("-inf"))
        return s_HGWN.softmax(-1).mean(1)


class Scorer(Protocol):
    """How much a row matters: a higher score stays longer.

    Inherit from it and write `score`; the other members have defaults.
    """

    phases: ClassVar[tuple[str, ...]] = ("prefill", "always")
    keeps_state: ClassVar[bool] = False  # True: column sums live on in the store and count as bytes

    @property
    def needs(self) -> Needs:
        """Statistics to record for it."""
        return Needs()

    def score(self, view: LayerView) -> Tensor:
        """Scores [H, N] fp32 of the stored rows of one layer; sinks and recent rows are protected elsewhere."""
        ...

    def default_recent(self, tokens: int, sinks: int) -> int:
        """Protected newest rows when `keep.recent` is null, for a budget of `tokens`."""
        return (tokens - sinks) // 2


class LayerBudget(Protocol):
    """How a budget of `tokens` rows per layer and head is divided over the layers."""

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        """Rows per KV head for each layer; the mean must not exceed `tokens`."""
        ...


class HeadBudget(Protocol):
    """How one layer's rows are divided over its KV heads."""

    def split(self, tokens: int, scores_HM: Tensor) -> list[int]:
        """Unprotected rows for each head, given the scores of the unprotected rows; the sum must not exceed H * tokens."""
        ...


class RowIndex:
    """Chosen rows of every head, sorted, as a flat index: whole rows are copied, which a gather over channels does not do.

    index_HM counts over an older tensor of rows and, after it, a newer one.
    """

    def __init__(self, index_HM: Tensor) -> None:
        self.index_HM = index_HM
        self._flat: dict[int, Tensor] = {}
        self._whole: dict[tuple[int, int], bool] = {}

    def of(self, old: Tensor, new: Tensor | None = None) -> Tensor:
        """Copy of the rows of old [H, N, ...] and new [H, L, ...] as [H, M, ...]; mostly all of the new ones stay."""
        if new is not None and not self._keeps_all(old.shape[1], new.shape[1]):
            old, new = torch.cat((old, new), 1), None
        out = old.flatten(0, 1).index_select(0, self._flat_index(old.shape[1])).view(*self.index_HM.shape, *old.shape[2:])
        if new is not None:
            out[:, -new.shape[1] :] = new
        return out

    def _flat_index(self, n: int) -> Tensor:
        if n not in self._flat:
            heads = torch.arange(self.index_HM.shape[0], device=self.index_HM.device)[:, None]
            self._flat[n] = (self.index_HM.clamp(max=n - 1) + heads * n).flatten()
        return self._flat[n]

    def _keeps_all(self, n: int, length: int) -> bool:
        """Whether every head keeps all `length` rows that follow the first n: then they need no index."""
        if (n, length) not in self._whole:
            first = self.index_HM[:, -length] if length <= self.index_HM.shape[1] else self.index_HM.new_full((1,), -1)
            self._whole[n, length] = bool((first == n).all())
        return self._whole[n, length]


@dataclass(frozen=True)
class Encoded:
    """Rows in stored form: every tensor has KV heads first and tokens (or blocks of tokens) second."""

    payload: Mapping[str, Tensor]
    metadata: Mapping[str, Tensor] = field(default_factory=dict)
    n: int = 0  # rows

    def cat(self, other: Encoded) -> Encoded:
        return Encoded(
            {k: torch.cat((t, other.payload[k]), 1) for k, t in self.payload.items()},
            {k: torch.cat((t, other.metadata[k]), 1) for k, t in self.metadata.items()},
            self.n + other.n,
        )

    def take(self, rows: RowIndex, newer: Encoded | None = None) -> Encoded:
        """Copy rows of this and of a newer chunk (codecs with block == 1 only)."""
        return Encoded(
            {k: rows.of(t, newer.payload[k] if newer else None) for k, t in self.payload.items()},
            {k: rows.of(t, newer.metadata[k] if newer else None) for k, t in self.metadata.items()},
            int(rows.index_HM.shape[1]),
        )

    def tensors(self) -> list[Tensor]:
        return [*self.payload.values(), *self.metadata.values()]


class Codec(Protocol):
    """How rows are stored. Blocks of rows are encoded once, oldest first, and never again."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int:
        """Rows that share metadata along the token axis; 1 when rows are independent and can be evicted one by one."""
        ...

    @property
    def residual(self) -> int:
        """Newest rows that stay exact (and up to block - 1 more, until a block is full)."""
        ...

    @property
    def lossy(self) -> bool: ...

    def info(self) -> dict[str, object]:
        """What a record says of the codec: bits, axis, group, scale source."""
        ...

    def check(self, head_dim: int) -> None:
        """Raise UserError when rows of this width cannot be encoded."""
        ...

    def encode(self, x_HND: Tensor) -> Encoded:
        """Encode n rows, n a multiple of block; metadata is in x's dtype."""
        ...

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        """Write the n rows into out_HND, a slice of what attention will read, in its dtype."""
        ...

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        """(payload, metadata) bytes of n encoded rows, n a multiple of block: the closed formula, padding included."""
        ...
