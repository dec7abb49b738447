"""What logits must be before anything is read from them, and distances between their distributions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

UNSOUND = "the model's logits are no distribution (NaN, or infinite): its dtype or kv_dtype cannot hold what it computes"
UNSOUND_FULL = f"of the full cache, {UNSOUND}"
IMPOSSIBLE = "the full cache gives probability to tokens that this stack makes impossible (logits of minus infinity)"
NEVER = "tokens of the text have no probability at all (logits of minus infinity): perplexity is infinite"


def sound(logits: Tensor) -> Tensor:
    """Of logits [..., V], whether each is a distribution: no NaN, nothing at plus infinity, something finite; bool [...].

    Entries at minus infinity are tokens that a model never gives.
    """
    most = logits.amax(-1)  # NaN where any entry is
    return most.isfinite()


def divergence(reference_LV: Tensor, logp_LV: Tensor) -> Tensor:
    """KL(reference | other) in nats of log-probabilities [L, V], over what the reference makes possible; [L].

    Infinite where the other makes such a token impossible.
    """
    possible = reference_LV > float("-inf")
    return torch.where(possible, reference_LV.exp() * (reference_LV - logp_LV), 0.0).sum(-1)


def padded(logits: Sequence[Tensor]) -> Tensor:
    """Logits [V] or [L, V] of several rows as one tensor; those of tokens that a row does not have are zero."""
    return torch.nn.utils.rnn.pad_sequence(list(logits), batch_first=True) if logits[0].ndim > 1 else torch.stack(list(logits))
