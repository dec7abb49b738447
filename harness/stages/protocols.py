"""The protocols of scorers, layer budgets and head budgets, and the views of the cache that they are given.

To add one: one class that inherits from its protocol, one YAML with its `_target_`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from harness.stages.single_views import SingleViews
from harness.stages.softmax import PLAIN, Softmax, window_weights


@dataclass(frozen=True)
class Needs:
    """Statistics that the attention function records for a scorer.

    column_sums: for every stored token the sum of its attention weights over all queries so far, averaged over the query
        heads of a group, [H, N] fp32. Exact, accumulated in query blocks; costs about a third of a prefill.
    queries: number W of newest queries to keep, after RoPE, [Q, W, D].
    query_moments: mean [Q, D] and covariance [Q, D, D] of all queries of the forward before RoPE, fp32.
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
    """Statistics recorded in one layer; fields that were not asked for are None."""

    column_sums_HN: Tensor | None = None
    queries_QWD: Tensor | None = None
    scaling: float = 1.0  # factor of q.k in attention, mostly D ** -0.5
    query_mean_QD: Tensor | None = None
    query_cov_QDD: Tensor | None = None
    softmax: Softmax = PLAIN  # what the layer's softmax has besides scaled q.k

    def tensors(self) -> list[Tensor]:
        """Everything recorded."""
        return [t for t in self._fields() if t is not None]

    def only(self, needs: Needs) -> Stats:
        """The statistics that these needs ask for, as views; others may have been recorded for other stacks."""
        return Stats(
            self.column_sums_HN if needs.column_sums else None,
            self.queries_QWD[:, -needs.queries :] if self.queries_QWD is not None and needs.queries else None,
            self.scaling,
            self.query_mean_QD if needs.query_moments else None,
            self.query_cov_QDD if needs.query_moments else None,
            self.softmax,
        )

    def copied(self) -> Stats:
        """Copies that may be written to."""
        sums, queries, mean, cov = (None if t is None else t.clone() for t in self._fields())
        return Stats(sums, queries, self.scaling, mean, cov, self.softmax)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def _fields(self) -> tuple[Tensor | None, ...]:
        return self.column_sums_HN, self.queries_QWD, self.query_mean_QD, self.query_cov_QDD

    @staticmethod
    def join(layers: Sequence[Stats]) -> Stats:
        """Statistics of several layers, concatenated along the heads."""
        first = layers[0]
        if len(layers) == 1 or not first.tensors():
            return first
        columns = zip(*(one._fields() for one in layers), strict=True)
        sums, queries, mean, cov = (None if c[0] is None else torch.cat([t for t in c if t is not None]) for c in columns)
        return Stats(sums, queries, first.scaling, mean, cov, Softmax.join([one.softmax for one in layers]))


class Rope(Protocol):
    """The model's own rotary embedding in one layer. x [..., N, D], pos_N integer positions; both keep x's dtype."""

    def rotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Apply the rotation of position pos_N[n] to x[..., n, :]."""
        ...

    def unrotate(self, x: Tensor, pos_N: Tensor) -> Tensor:
        """Undo rotate."""
        ...


@dataclass(frozen=True)
class LayerView:
    """One layer as a scorer sees it: decoded keys and values in position order, and the statistics it declared in `needs`.

    All tensors are copies: the scorer may write to them.
    shared: its heads share one set of tokens, as they read one latent. They are one query group: attention and column sums are
    means over all of them, and so is what a scorer returns.
    A scorer with `joint = True` may get several layers that hold equally many tokens in one view, concatenated along the heads;
    `each` are then the views of the single layers.
    """

    layer: int
    seen: int  # tokens seen so far; the newest is at position seen - 1
    pos_HN: Tensor  # original positions, int32
    stats: Stats
    read_keys: Callable[[], Tensor]
    read_values: Callable[[], Tensor]
    seed: int = 0  # of the example, for scorers that draw random numbers
    rope: Rope | None = None  # None if the model has no rotary positions
    each: SingleViews[LayerView] = field(default_factory=SingleViews)
    shared: bool = False

    def seen_by(self, needs: Needs) -> LayerView:
        """The view for one stage: with copies of the statistics in `needs`, and no others."""
        stats, each = self.stats.only(needs).copied(), self.each.map(lambda one: one.seen_by(needs))
        return replace(self, pos_HN=self.pos_HN.clone(), stats=stats, each=each)

    @property
    def layers(self) -> Sequence[LayerView]:
        """The views of the single layers."""
        return self.each or (self,)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the single layers."""
        return self.each.numbers or (self.layer,)

    @property
    def alike(self) -> bool:
        """Whether all its layers have the same RoPE, attention scale and kind of softmax, so that one call can score them."""
        return not self.shared and self.each.alike

    @property
    def n(self) -> int:
        """Tokens stored per KV head."""
        return int(self.pos_HN.shape[1])

    @cached_property
    def k_HND(self) -> Tensor:
        """Stored keys [H, N, D], fp32; decoded on first access."""
        return self.read_keys()

    @cached_property
    def v_HND(self) -> Tensor:
        """Stored values [H, N, D], fp32; decoded on first access."""
        return self.read_values()

    def window_attention(self, window: int) -> Tensor:
        """Attention weights of the last `window` queries over all stored tokens, [H, W, N] fp32, mean over each query group.

        Causal within the window: a query does not see tokens at later positions.
        """
        q_QWD = self.stats.queries_QWD
        assert q_QWD is not None, "the scorer must declare needs.queries"
        q_QWD, stats = q_QWD[:, -window:].float(), self.stats
        a_HWN = window_weights(q_QWD, self.k_HND, self.pos_HN, self.seen, stats.scaling, stats.softmax)
        return a_HWN.mean(0, keepdim=True).repeat(len(a_HWN), 1, 1) if self.shared else a_HWN


class Scorer(Protocol):
    """Scores the stored tokens; the highest scores are kept. Inherit and write `score`; the other members have defaults.

    phases: values of compress.phase that it can run in.
    keeps_state: its column sums are stored with the cache after the context, and count as bytes.
    joint: `score` may get the heads of many layers in one view (faster); not inherited, so a subclass must set it again.
    """

    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked", "always", "every_n")
    keeps_state: ClassVar[bool] = False
    joint: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        """Statistics to record for it."""
        return Needs()

    def score(self, view: LayerView) -> Tensor:
        """Scores [H, N] fp32 of the stored tokens. Scores of sinks and recent tokens are ignored: Keep always keeps these."""
        ...

    def default_recent(self, tokens: int, sinks: int) -> int:
        """Number of protected newest tokens if `keep.recent` is null, under a budget of `tokens`."""
        return (tokens - sinks) // 2


class LayerBudget(Protocol):
    """Divides the budget over the layers. Inherit and write `split`; the other members have defaults.

    by_shape: whether `split` reads nothing of its views but their numbers of tokens and heads, so that sizes are known before
    anything is fed. spends_all: whether its budgets always add up to all of it.
    """

    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked", "always", "every_n")
    by_shape: ClassVar[bool] = False
    spends_all: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        """Statistics to record for it, in addition to the scorer's."""
        return Needs()

    def beyond(self, protected: int) -> LayerBudget:
        """This layer budget for a Keep that protects `protected` tokens (sinks + recent) in every layer."""
        return self

    def split(self, tokens: int, views: Sequence[LayerView]) -> list[int]:
        """Budgets in tokens per KV head, one for each layer; their mean must not exceed `tokens`."""
        ...


class HeadBudget(Protocol):
    """Divides a layer's budget over its KV heads. Inherit and write `split`.

    by_shape: whether `split` reads nothing of the scores but their shape. spends_all: whether it always gives out all of it.
    """

    by_shape: ClassVar[bool] = False
    spends_all: ClassVar[bool] = False

    def split(self, tokens: int, scores_HM: Tensor, layer: int) -> list[int]:
        """Number of unprotected tokens for each of H heads; their sum must not exceed H * tokens.

        tokens: mean budget of unprotected tokens per head. scores_HM: scores of the M unprotected tokens.
        """
        ...
