"""What logits must be before anything is read from them, and distances between their distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.stages.transfers import fetched

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


def likeliest(logits: Tensor) -> Tensor:
    """The first most likely token of each of logits [..., V], int64; -1 where they are not `sound`."""
    most, token = logits.max(-1)
    return token.masked_fill_(most - most != 0, -1)  # `isfinite` in two steps instead of five: every token waits for them


@dataclass(frozen=True)
class Marks:
    """Of consecutive tokens: log-probability, whether it was the most likely one, whether its logits were a distribution."""

    logp: tuple[float, ...]
    top: tuple[bool, ...]
    sound: tuple[bool, ...]


def scored(logits: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> list[Marks]:
    """Marks of the target tokens under logits [L, V] of each of several sequences; the host waits once for all of them."""
    sizes = [len(target) for target in targets]
    flat = torch.tensor([token for target in targets for token in target], device=logits[0].device)
    found: list[Tensor] = []
    for logits_LV, wanted in zip(logits, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
        exact_LV = logits_LV.float()
        logp_L = exact_LV.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        found += [logp_L, exact_LV.argmax(-1) == wanted, sound(exact_LV)]
    host = [tuple(x.tolist()) for x in fetched(found)]
    return [Marks(*host[i : i + 3]) for i in range(0, len(host), 3)]


def divergence(reference_LV: Tensor, logp_LV: Tensor) -> Tensor:
    """KL(reference | other) in nats of log-probabilities [L, V], over what the reference makes possible; [L].

    Infinite where the other makes such a token impossible.
    """
    possible = reference_LV > float("-inf")
    return torch.where(possible, reference_LV.exp() * (reference_LV - logp_LV), 0.0).sum(-1)


def padded(logits: Sequence[Tensor]) -> Tensor:
    """Logits [V] or [L, V] of several rows as one tensor; those of tokens that a row does not have are zero."""
    return torch.nn.utils.rnn.pad_sequence(list(logits), batch_first=True) if logits[0].ndim > 1 else torch.stack(list(logits))
