"""What sharing asks to have measured on calibration text: how similar layers are, or bases that align heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.calibrate.calibration_text import ROLES, CalibrationText, exact_rows
from harness.engine.engine import Engine
from harness.models.load import LM
from harness.stages.limits import Calibration
from harness.stages.protocols import Rope
from harness.stages.share.aligned_heads import AlignedHeads, aligned
from harness.stages.share.one_latent import OneLatent, mixed
from harness.stages.share.sharing import Measured, Share

FORMAT = 1  # of the tables and of how they are measured; part of their address
TINY = 1e-12  # lengths below it are not divided by


def measured_share(engine: Engine, lm: LM, share: Share, wanted: Calibration) -> Share:
    """The share with what it asks for, measured the first time it is asked for.

    Raises:
        UserError: the text cannot be had, heads cannot be divided so, or the table is not the one that is pinned.
    """
    text = CalibrationText.of(lm, wanted)
    if isinstance(share, AlignedHeads):
        groups = {str(i): share.heads(engine.shape.layers[i].heads) for i in engine.shape.full_layers}
        how: dict[str, object] = {"format": FORMAT, "stored_heads": groups}
        tables, about = text.table(engine, "bases.safetensors", how, lambda: bases(engine, text.windows, share))
    elif isinstance(share, OneLatent):
        how = {"format": FORMAT, "rope_heads": share.rope_heads}
        tables, about = text.table(engine, "latents.safetensors", how, lambda: latents(engine, text.windows, share))
    else:
        how = {"format": FORMAT, "what": "similarities"}
        tables, about = text.table(engine, "similarities.safetensors", how, lambda: similarities(engine, text.windows))
    return share.fitted(Measured(tables, about))


def similarities(engine: Engine, windows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Mean cosine [L] of each full layer's keys and values with those of layers 0 .. L - 1, named similarity.LAYER.

    Over all tokens, heads, keys and values; 0 with layers of another shape or without full attention.
    """
    shape, n = engine.shape, len(engine.shape.layers)
    total = torch.zeros(n, n, dtype=torch.float64)
    count = 0
    for ids in windows:
        rows = dict(exact_rows(engine, ids))
        count += len(ids)
        for role in ROLES:
            for layers in shape.groups():
                if shape.layers[layers[0]].window is None:
                    units = torch.stack([_units(rows[f"{role}.{layer}"]) for layer in layers])
                    mean = units.flatten(1) @ units.flatten(1).mT / (2 * shape.layers[layers[0]].heads)
                    where = torch.tensor(layers)
                    total[where[:, None], where] += mean.double().cpu()
    return {f"similarity.{i}": (total[i] / count).float() for i in shape.full_layers}


def bases(engine: Engine, windows: Sequence[Sequence[int]], share: Share) -> dict[str, Tensor]:
    """Bases [H, D, D] that align the heads of each group, named ROLE.LAYER, of every full layer."""
    products: dict[str, Tensor] = {}
    for ids in windows:
        for name, found in _products(dict(exact_rows(engine, ids)), share).items():
            products[name] = products[name] + found if name in products else found
    return {name: aligned(found).contiguous() for name, found in products.items()}


def latents(engine: Engine, windows: Sequence[Sequence[int]], share: OneLatent) -> dict[str, Tensor]:
    """How heads are mixed, and components of what is not rotated: turns.LAYER, vectors.LAYER, ratio.LAYER of full layers."""
    moments: dict[int, Tensor] = {}
    for ids in windows:
        rows = dict(exact_rows(engine, ids, unrotated=True))
        for layer in engine.shape.full_layers:
            both_HNE = (rows[f"keys.{layer}"], rows[f"values.{layer}"])
            x_NE = torch.cat([x.transpose(0, 1).flatten(1) for x in both_HNE], 1).cpu().double()
            moments[layer] = moments.get(layer, 0) + x_NE.T @ x_NE
    found: dict[str, Tensor] = {}
    for layer, moment in moments.items():
        heads, d_key, rope = engine.shape.layers[layer].heads, engine.shape.layers[layer].d_key, engine.ropes[layer]
        assert rope is not None, "models without rotary positions are refused"
        parts = mixed(moment, heads, d_key, partners(rope, d_key, engine.device), share.rotated(heads))
        found |= {f"{name}.{layer}": x for name, x in parts._asdict().items()}
    return found


def partners(rope: Rope, d: int, device: torch.device) -> list[int]:
    """For each channel of a key the one that a rotation turns it with, itself if it is not turned."""
    turned_DD = (
        rope.rotate(torch.eye(d, device=device)[:, None], torch.ones(1, dtype=torch.long, device=device))[:, 0].abs().cpu()
    )
    others = turned_DD.fill_diagonal_(0)
    return [int(row.argmax()) if float(row.max()) > 0 else channel for channel, row in enumerate(others)]


def _products(rows: Mapping[str, Tensor], share: Share) -> dict[str, Tensor]:
    """x_a^T x_b [P, T, T, D, D] of every two of the T heads of P groups."""
    found = {}
    for name, x_HND in rows.items():
        x_PTND: Tensor = x_HND.float().unflatten(0, (share.heads(len(x_HND)), -1))  # type: ignore[no-untyped-call]
        found[name] = torch.einsum("pand,pbne->pabde", x_PTND, x_PTND).double().cpu()
    return found


def _units(x_HND: Tensor) -> Tensor:
    x = x_HND.float()
    units: Tensor = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=TINY)
    return units
