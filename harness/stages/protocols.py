"""What a stage of the stack must offer, and what it may see; it knows no model, no cache and no file.

A newcomer extends the project here: one class that satisfies a protocol, one YAML with its `_target_`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    query_moments: mean [Q, D] and covariance [Q, D, D] of all queries of the forward before their rotation, fp32.
    """

    column_sums: bool = False
    queries: int = 0
    query_moments: bool = False

    def __bool__(self) -> bool:
        return self.column_sums or self.queries > 0 or self.query_moments

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
        return [t for t in self._fields() if t is not None]

    def only(self, needs: Needs) -> Stats:
        """Views of what these needs ask for, of what was recorded for several."""
        return Stats(
            self.column_sums_HN if needs.column_sums else None,
            self.queries_QWD[:, -needs.queries :] if self.queries_QWD is not None and needs.queries else None,
            self.scaling,
            self.query_mean_QD if needs.query_moments else None,
            self.query_cov_QDD if needs.query_moments else None,
        )

    def copied(self) -> Stats:
        """The same in storages of their own: who writes into them changes nothing elsewhere."""
        sums, queries, mean, cov = (None if t is None else t.clone() for t in self._fields())
        return Stats(sums, queries, self.scaling, mean, cov)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def _fields(self) -> tuple[Tensor | None, ...]:
        return self.column_sums_HN, self.queries_QWD, self.query_mean_QD, self.query_cov_QDD

    @staticmethod
    def join(layers: Sequence[Stats]) -> Stats:
        """Statistics of several layers, their heads one after another."""
        first = layers[0]
        if len(layers) == 1 or not first.tensors():
            return first
        columns = zip(*(one._fields() for one in layers), strict=True)
        sums, queries, mean, cov = (None if c[0] is None else torch.cat([t for t in c if t is not None]) for c in columns)
        return Stats(sums, queries, first.scaling, mean, cov)


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
    """One layer as a scorer sees it: decoded rows in position order, and exactly the statistics it declared in `needs`.

    All tensors are the scorer's own, whoever else shares the prefill: it may write into them.
    A scorer that is `joint` gets several layers that hold as many rows in one view, their heads one after another; `each` are
    then the views of the single layers.
    """

    layer: int
    seen: int  # tokens seen so far; the newest stored row stands at seen - 1
    pos_HN: Tensor  # int32 original positions
    stats: Stats
    read_keys: Callable[[], Tensor]
    read_values: Callable[[], Tensor]
    seed: int = 0  # of the example, for scorers that draw lots
    rope: Rope | None = None  # None where the model has no rotary positions
    each: tuple[LayerView, ...] = ()

    def seen_by(self, needs: Needs) -> LayerView:
        """This view as one stage gets it: copies of the statistics that it asked for, and of no others."""
        each = tuple(one.seen_by(needs) for one in self.each)
        return replace(self, pos_HN=self.pos_HN.clone(), stats=self.stats.only(needs).copied(), each=each)

    @property
    def layers(self) -> tuple[LayerView, ...]:
        """The views of the single layers."""
        return self.each or (self,)

    @property
    def alike(self) -> bool:
        """Whether its layers rotate and scale alike, so that they can be scored in one go."""
        return len({(id(one.rope), one.stats.scaling) for one in self.layers}) == 1

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

    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked", "always", "every_n")
    keeps_state: ClassVar[bool] = False  # True: column sums live on in the store and count as bytes
    joint: ClassVar[bool] = False  # True: score() may get the heads of many layers at once (faster); a subclass must repeat it

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
    """How a budget of `tokens` rows per layer and head is divided over the layers; inherit from it and write `split`."""

    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked", "always", "every_n")

    @property
    def needs(self) -> Needs:
        """Statistics to record for it, beside the scorer's."""
        return Needs()

    def beyond(self, protected: int) -> LayerBudget:
        """This budget for a keep that protects `protected` rows (sinks + recent) of every layer under the whole budget."""
        return self

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        """Rows per KV head for each layer; the mean must not exceed `tokens`."""
        ...


class HeadBudget(Protocol):
    """How one layer's rows are divided over its KV heads; inherit from it and write `split`."""

    def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
        """Unprotected rows for each head, given the scores of the unprotected rows; the sum must not exceed H * tokens."""
        ...
