"""A full cache whose rows are changed after every forward by a slow rule: what a shared cache must equal."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from tests.support.masked_reference import Kept, MaskedCache
from tests.support.share_oracles import Rule


class Changed(MaskedCache):
    """A full cache of which later tokens read what a rule makes of the rows of each forward."""

    def __init__(self, model: PreTrainedModel, windows: list[int | None], rule: Rule) -> None:
        super().__init__(model, windows)
        self.rule = rule

    def feed(self, tokens: Sequence[int], kept: Kept | None) -> Tensor:
        before = self.seen
        logits = super().feed(tokens, kept)
        for side in ("keys", "values"):
            rows = [getattr(layer, side)[0, :, before:] for layer in self.cache.layers]
            for layer, new in zip(self.cache.layers, self.rule(rows, before), strict=True):
                whole = getattr(layer, side).clone()
                whole[0, :, before:] = new
                setattr(layer, side, whole)
        return logits
