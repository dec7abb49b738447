"""How much the loss of a text depends on each of its keys and values: squared gradients, the diagonal of Fisher information."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.calibrate.calibration_text import ROLES
from harness.engine.engine import Engine
from harness.kv.compat import forward
from harness.kv.families.position_tables import placed
from harness.kv.forward import CURRENT, Forward
from harness.kv.positions import held
from harness.kv.rope import LayerRope

ROWS = 256  # of logits whose gradient is computed at a time, in fp32


def squared_gradients(engine: Engine, ids: Sequence[int], *, unrotated: bool = False) -> dict[str, Tensor]:
    """(dL / dx)^2 of every number of a window's keys and values, fp32 [h, N, D], named ROLE.LAYER for every full layer.

    L: the negative log-likelihood of the window's tokens after its first, summed, which keeps gradients of float16 models above
    what float16 rounds to nothing. It changes with x by way of all later layers. unrotated: of keys before RoPE.
    Takes the memory of a backward pass over one window: activations of all layers, logits twice, no gradients of weights.
    Models that gradients cannot be asked of are refused by `Engine.check`.
    """
    run = engine.begin([engine.start(length=len(ids))], [len(ids)])
    run.leaves = {}
    with torch.enable_grad():
        logits_NV = _logits(engine, run, ids)
        leaves = {f"{role}.{i}": x for i in engine.shape.full_layers for role, x in zip(ROLES, run.leaves[i], strict=True)}
        found = torch.autograd.grad(logits_NV, list(leaves.values()), _of_logits(logits_NV.detach(), ids))
    gradients = {name: x[0] for name, x in zip(leaves, found, strict=True)}
    if unrotated:
        for layer in engine.shape.full_layers:
            gradients[f"keys.{layer}"] = _before(engine.ropes[layer], gradients[f"keys.{layer}"])
    return {name: x.float().square() for name, x in gradients.items()}


def _logits(engine: Engine, run: Forward, ids: Sequence[int]) -> Tensor:
    """Logits [N, V] of one forward of the exact model, which gradients can be asked of."""
    tokens = torch.tensor([list(ids)], device=engine.device)
    positions = torch.arange(len(ids), device=engine.device)[None]
    token = CURRENT.set(run)
    try:
        with held(engine.rotary, [len(ids)]), placed(engine.placed_table, positions):
            return forward(engine.model, tokens, positions, engine.entrance.open([None]), slice(None))[0]
    finally:
        CURRENT.reset(token)


def _of_logits(logits_NV: Tensor, ids: Sequence[int]) -> Tensor:
    """The loss's own gradient: probabilities, less 1 for the token that follows; nothing follows the last."""
    out = torch.zeros_like(logits_NV)
    following = torch.tensor(list(ids[1:]), device=logits_NV.device)[:, None]
    for start in range(0, len(following), ROWS):
        targets = following[start : start + ROWS]
        probabilities = logits_NV[start : start + len(targets)].float().softmax(-1)
        out[start : start + len(targets)] = probabilities.scatter_add_(1, targets, torch.full_like(targets, -1).float())
    return out


def _before(rope: LayerRope | None, gradient_HND: Tensor) -> Tensor:
    """The gradient with respect to keys before RoPE: x -> rotate(x) is linear, so it is the same at every x."""
    assert rope is not None, "stacks that ask for keys before RoPE are refused for such a model"
    positions = torch.arange(gradient_HND.shape[1], device=gradient_HND.device)
    with torch.enable_grad():
        x_HND = torch.zeros_like(gradient_HND, dtype=torch.float32, requires_grad=True)
        (found,) = torch.autograd.grad(rope.rotate(x_HND, positions), x_HND, gradient_HND.float())
    return found
