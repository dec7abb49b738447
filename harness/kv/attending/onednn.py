"""fp32 products x w^T by oneDNN: on a CPU where the default library stays below AVX-512 they take half the time."""

from __future__ import annotations

import torch
from torch import Tensor


def has_linear(x: Tensor) -> bool:
    """Whether oneDNN multiplies tensors like x here: fp32 on a CPU, in a build of torch that has the product."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    here = bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)  # type: ignore[attr-defined, no-untyped-call]
    return here and all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


def linear(x_RD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """[R, N]; the weight as a plain contiguous matrix or in oneDNN's own layout. Without gradients.

    What is not contiguous would take a path that is hundreds of times as slow.
    """
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_RD.contiguous(), weight_ND, bias_N, "none", [], "")
    return out
