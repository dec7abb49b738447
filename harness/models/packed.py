"""Weights in the layout that oneDNN multiplies from: fp32 products of few rows on a CPU, faster than from a plain matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from harness.kv.attending.onednn import has_linear, linear

MOST = 2 << 30  # bytes of the weights of a model that is copied; of a larger one the memory counts more than the time


class Packed:
    """A linear layer's weight [out, in] in oneDNN's layout, laid out for calls of `rows` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self.bias, self.shape = bias, (*weight.shape, bias is not None)

    def __call__(self, x_RD: Tensor) -> Tensor:
        """The product of x [R, in] and the weight, [R, out]."""
        return linear(x_RD, self.weight, self.bias)


def packed(layers: Sequence[torch.nn.Module], rows: int) -> list[Packed | None]:
    """The layers' weights for calls of `rows` rows; None where that cannot be had, and for all of more than MOST bytes.

    Whether a model is copied depends on its weights and on nothing else of a run: its logits must not.
    """
    weights = [_weight(layer) for layer in layers]
    if sum(w.numel() * w.element_size() for w in weights) > MOST:
        return [None] * len(layers)
    return [Packed(w, _bias(one), rows) if _possible(one, w) else None for one, w in zip(layers, weights, strict=True)]


def _weight(layer: torch.nn.Module) -> Tensor:
    """[out, in], as a linear layer has it; transformers' Conv1D has it the other way."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight if isinstance(layer, torch.nn.Linear) else weight.t()


def _bias(layer: torch.nn.Module) -> Tensor | None:
    bias = layer.bias
    return bias if isinstance(bias, Tensor) else None


def _possible(layer: torch.nn.Module, weight: Tensor) -> bool:
    """Whether oneDNN has this layer's product: subclasses may do something else."""
    return type(layer) in (torch.nn.Linear, Conv1D) and has_linear(weight)
