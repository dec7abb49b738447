"""Bases that low-rank codecs store coefficients in: of keys or values of calibration text, or of a layer's own projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.calibrate.calibration_text import CalibrationText, exact_rows, of_role
from harness.engine.engine import Engine
from harness.errors import UnfitStackError
from harness.models.load import LM
from harness.stages.bases import Bases, Span, principal
from harness.stages.limits import Calibration

FORMAT = 1  # of the table and of how it is measured; part of its address
FILE = "bases.safetensors"
WEIGHTS = {"keys": "k_proj", "values": "v_proj"}
NORMS = {"keys": "k_norm", "values": "v_norm"}
LEGAL = "legal is codec.of=text"


def bases(engine: Engine, lm: LM, wanted: Calibration | None, span: Span, role: str, *, unrotated: bool = False) -> Bases:
    """Bases of "keys" or "values"; those of a text are found the first time they are asked for.

    unrotated: of keys before RoPE.

    Raises:
        UserError: the text cannot be had, or the model has no projection that makes keys or values alone.
    """
    before: dict[str, object] = {"rope": "pre"} if unrotated else {}
    if span.of == "weights" or wanted is None:
        about: dict[str, object] = {}
        tensors = _principal(of_weights(engine, span, role, unrotated=unrotated))
    else:
        text = CalibrationText.of(lm, wanted)
        how = {"format": FORMAT, "role": role, "heads": span.heads, "skip": span.skip, **before}
        tensors, about = text.table(
            engine, FILE, how, lambda: _principal(of_text(engine, text.windows, span, role, unrotated=unrotated))
        )
    return Bases(of_role(tensors, role, "vectors"), about | before, of_role(tensors, role, "energy"))


def of_text(
    engine: Engine, windows: Sequence[Sequence[int]], span: Span, role: str, *, unrotated: bool = False
) -> dict[str, Tensor]:
    """Second moments [sets, s * D, s * D] over all tokens of all windows, not centred, fp64, named ROLE.LAYER."""
    found: dict[str, Tensor] = {}
    for ids in windows:
        for name, x_HND in exact_rows(engine, ids, unrotated=unrotated):
            if name.startswith(f"{role}."):
                moment = _moment(x_HND[:, span.skip :].cpu().double(), span)
                found[name] = found[name] + moment if name in found else moment
    return found


def of_weights(engine: Engine, span: Span, role: str, *, unrotated: bool) -> dict[str, Tensor]:
    """The same of a projection's rows, its bias as one more column: W W^T."""
    if role == "keys" and not unrotated and any(rope is not None for rope in engine.ropes):
        raise UnfitStackError("codec.of='weights' spans keys before RoPE: legal are compress.rope=pre or codec.of=text")
    layers = {int(m.layer_idx): m for m in engine.model.get_decoder().modules() if hasattr(m, "layer_idx")}
    found = {}
    for layer in engine.shape.full_layers:
        shape = engine.shape.layers[layer]
        h, d = shape.heads, shape.d_key if role == "keys" else shape.d_value
        rows = _rows(layers.get(engine.shape.of_model([layer])[0]), role, h * d)
        found[f"{role}.{layer}"] = _moment(rows.view(h, d, -1).transpose(1, 2), span)
    return found


def _rows(module: torch.nn.Module | None, role: str, width: int) -> Tensor:
    """The rows of a layer's projection [h * D, inputs], fp64, its bias as the last input."""
    projection = getattr(module, WEIGHTS[role], None)
    if not isinstance(projection, torch.nn.Linear) or projection.out_features != width:
        raise UnfitStackError(
            f"codec.of='weights' is not possible with this model: no {WEIGHTS[role]} makes its {role}; {LEGAL}"
        )
    if hasattr(module, NORMS[role]):
        raise UnfitStackError(
            f"codec.of='weights' is not possible with this model: its {role} are normed behind {WEIGHTS[role]}; {LEGAL}"
        )
    weight = projection.weight.detach().cpu().double()
    return weight if projection.bias is None else torch.cat((weight, projection.bias.detach().cpu().double()[:, None]), 1)


def _moment(x_HND: Tensor, span: Span) -> Tensor:
    side = _sides(x_HND, span)
    return side.transpose(1, 2) @ side


def _sides(x_HND: Tensor, span: Span) -> Tensor:
    """Heads side by side, [sets, N, s * D]."""
    h, n, d = x_HND.shape
    s = span.heads or h
    return x_HND.reshape(h // s, s, n, d).transpose(1, 2).reshape(h // s, n, s * d)


def _principal(moments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Bases and energies, named ROLE.LAYER.vectors and ROLE.LAYER.energy."""
    found: dict[str, Tensor] = {}
    for name, moment in moments.items():
        found[f"{name}.vectors"], found[f"{name}.energy"] = principal(moment)
    return found
