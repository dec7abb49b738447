"""What a stage of the stack must offer, and what it may see; it knows no model, no cache and no file.

A newcomer extends the project here: one class that satisfies a protocol, one YAML with its `_target_`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from harness.stages.encoded import Encoded, Heads
from harness.stages.limits import Calibration, Limits


@dataclass(frozen=True)
class Needs:
    """Statistics that a scorer asks the attention function to record.

    column_sums: for every stored row, the sum over all queries so far of the attention it received (mean over the query
        heads of a group), [H, N] fp32. Exact, accumulated in query blocks: costs about a third of a prefill.
    queries: how many of the latest queries (rotated, as used in attention) to keep, [Q, W, D].
    query_moments: mean [Q, D] and covariance [Q, D, D] of all queries of the forward before their rotation, fp32.
    """

    column_sums: bool = False
    queries: int = 0
    query_moments: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            self.column_sums or other.column_sums,
            max(self.queries, other.queries),
            self.query_moments or other.query_moments,
        )


@dataclass(frozen=True)
class Stats:
    """Statistics recorded in one layer; a field that no stack asked for is None."""

    column_sums_HN: Tensor | None = None
    queries_QWD: Tensor | None = None
    scaling: float = 1.0  # what attention multiplied q.k by
    query_mean_QD: Tensor | None = None
    query_cov_QDD: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Everything recorded."""
        fields = (self.column_sums_HN, self.queries_QWD, self.query_mean_QD, self.query_cov_QDD)
        return [t for t in fields if t is not None]


class Rope(Protocol):
    """The model's own rotary embedding in one layer. x [..., N, D], pos_N integer positions; both keep x's dtype."""

    def rotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Turn row n to position pos_N[n]."""
        ...

    def unrotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Undo rotate."""
        ...


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
    rope: Rope | None = None  # None where the model has no rotary positions

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

    def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
        """Unprotected rows for each head, given the scores of the unprotected rows; the sum must not exceed H * tokens."""
        ...


class Codec(Protocol):
    """How rows are stored. Blocks of rows are encoded once, oldest first, and never again.

    Inherit from it, give it a `name`, and write `encode`, `decode` and `nbytes`; the other members have defaults. The H heads
    of a tensor may be those of many layers at once: treat each head by itself.
    """

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int:
        """Rows that share metadata along the token axis; 1 when rows are independent and can be evicted one by one."""
        return 1

    @property
    def flush(self) -> int:
        """Rows that leave the exact tail together, a multiple of block."""
        return self.block

    @property
    def residual(self) -> int:
        """Newest rows that stay exact (and up to flush - 1 more, until there are enough to leave together)."""
        return 0

    def leaving(self, tail: int, encoded: int) -> int:
        """Of `tail` exact rows behind `encoded` stored ones, how many leave now, oldest first: a multiple of flush."""
        return max(tail - self.residual, 0) // self.flush * self.flush

    @property
    def lossy(self) -> bool:
        """False only where decoding gives back what was encoded, bit for bit."""
        return True

    def info(self) -> dict[str, object]:
        """What a record says of the codec: bits, axis, group, scale source (unit, dynamic, frozen, calibrated)."""
        return {"codec": self.name}

    def check(self, head_dim: int) -> None:
        """Raise UserError when rows of this width cannot be encoded."""

    def for_role(self, role: str) -> Codec:
        """The codec for "keys" or for "values"."""
        return self

    @property
    def calibration(self) -> Calibration | None:
        """The text on which its constants are to be measured before anything is encoded, if it needs that."""
        return None

    def calibrated(self, limits: Limits) -> Codec:
        """The codec with the limits that its `calibration` asked for."""
        return self

    def fit(self, x_HND: Tensor, heads: Heads) -> Codec:
        """The codec for exactly these heads, asked once, with the first rows they encode: where constants are fixed."""
        return self

    def encode(self, x_HND: Tensor) -> Encoded:
        """Encode n rows, n a multiple of flush; metadata is in x's dtype."""
        ...

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        """Write the n rows into out_HND, a slice of what attention will read, in its dtype."""
        ...

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        """(payload, metadata) bytes of n encoded rows, n a multiple of flush: the closed formula, padding included."""
        ...
