"""Expected attention: how much future queries, modelled as a Gaussian, will attend to each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.errors import require
from harness.stages.protocols import LayerView, Needs, Scorer


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Scorer):
    """A variant of Expected Attention (arXiv 2510.00636; kvpress: ExpectedAttentionPress).

    Queries before rotation are modelled as N(m, C), with mean m and covariance C of all queries of the forward. R is the
    rotation matrix averaged over the next `future` positions and s the attention scale:
    z_j = s (R m)^T k_j + s^2 / 2 k_j^T (R C R^T) k_j; a = softmax_j(z), with the layer's learned sinks and position biases if
    it has any, averaged over a query group;
    score_j = (a_j + epsilon) * ||v_j||_2.

    Differs from the paper: it takes ||W_o v_j||_2, and W_o is not available to a scorer.
    """

    future: int = 512
    epsilon: float = 0.0
    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked")

    def __post_init__(self) -> None:
        ok = isinstance(self.future, int) and self.future > 0
        require(ok, "keep.scorer.future", self.future, "a positive number of positions")
        ok = isinstance(self.epsilon, (int, float)) and self.epsilon >= 0
        require(ok, "keep.scorer.epsilon", self.epsilon, "a number, 0 or more")

    @property
    def needs(self) -> Needs:
        return Needs(query_moments=True)

    def score(self, view: LayerView) -> Tensor:
        mean_QD, cov_QDD = view.stats.query_mean_QD, view.stats.query_cov_QDD
        assert mean_QD is not None and cov_QDD is not None, "the scorer must declare needs.query_moments"
        mean_QD, cov_QDD = mean_QD.float(), cov_QDD.float()
        if view.rope is not None:
            r_DD = self._mean_rotation(view, mean_QD.shape[1])
            mean_QD, cov_QDD = mean_QD @ r_DD.mT, r_DD @ cov_QDD @ r_DD.mT
        (h, _, d), scale = view.k_HND.shape, view.stats.scaling
        mean_HGD, cov_HGDD = mean_QD.view(h, -1, d), cov_QDD.view(h, -1, d, d)
        first_HGN = scale * mean_HGD @ view.k_HND.mT
        second_HGN = scale**2 / 2 * ((view.k_HND[:, None] @ cov_HGDD) * view.k_HND[:, None]).sum(-1)
        z_HG1N = (first_HGN + second_HGN)[..., None, :]
        a_HN = view.stats.softmax.weights(z_HG1N, view.pos_HN, None)[..., 0, :].mean(1)
        norms_HN: Tensor = torch.linalg.vector_norm(view.v_HND, dim=-1)
        return (a_HN + self.epsilon) * norms_HN

    def _mean_rotation(self, view: LayerView, d: int) -> Tensor:
        """R [D, D]: the rotation matrix averaged over the next `future` positions."""
        assert view.rope is not None
        device = view.k_HND.device
        pos = torch.arange(view.seen, view.seen + self.future, device=device)
        basis_DND = torch.eye(d, device=device)[:, None].expand(d, self.future, d)
        return view.rope.rotate(basis_DND, pos).float().mean(1).mT

    def default_recent(self, tokens: int, sinks: int) -> int:
        return 0
