"""How much each layer's attention output suffers when its keys, or its values, are stored by a codec: an order of layers."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from harness.calibrate.calibration_text import CalibrationText, of_role
from harness.engine.engine import Engine
from harness.errors import UnfitStackError
from harness.kv.token_store import TokenStore
from harness.models.load import LM
from harness.stages.codec.base import Codec
from harness.stages.codec.by_layer import ByLayer
from harness.stages.encoded import Heads
from harness.stages.limits import Calibration, Limits
from harness.stages.protocols import Needs

FORMAT = 1  # of the table and of how it is measured; part of its address
FILE = "sensitivity.safetensors"
QUERIES = 64  # newest of each window, whose attention output is compared


def sensitivity(engine: Engine, lm: LM, codec: ByLayer, wanted: Calibration, role: str) -> Limits:
    """The relative error [] of every compressed layer, measured the first time it is asked for; with the cheaper codec.

    role: "keys" or "values", whichever is stored by the codec; the other side stays exact.
    """
    if any(engine.shape.layers[layer].expanded for layer in engine.shape.full_layers):
        raise UnfitStackError(
            "codec.layers='sensitive' is not possible with this model: it stores latents, whose layers are not ranked; legal "
            "are first, last or a list"
        )
    name, text = codec.between[0], CalibrationText.of(lm, wanted)
    cheap = codec.codecs[name]
    how = {"format": FORMAT, "sensitivity": json.dumps(cheap.info(), sort_keys=True), "role": role, "queries": QUERIES}
    tensors, about = text.table(engine, FILE, how, lambda: measured(engine, text.windows, cheap, role))
    return Limits(of_role(tensors, role), about | {"stored_as": name, "queries": QUERIES})


def measured(engine: Engine, windows: Sequence[Sequence[int]], codec: Codec, role: str) -> dict[str, Tensor]:
    """|o' - o| / |o| over the newest queries of all windows, fp32 [], named ROLE.LAYER; o: attention output of a layer.

    Each window is a prefill of its own. o' reads what a store with this codec holds, exact tokens included.
    """
    moved = {layer: torch.zeros(2, dtype=torch.float64) for layer in engine.shape.full_layers}
    for ids in windows:
        prefix = engine.prefill(ids, Needs(queries=QUERIES))
        for layer in engine.shape.full_layers:
            ((part, at),) = prefix.row.slots[layer]
            exact = {"keys": part.keys.exact()[at], "values": part.values.exact()[at]}
            x = exact[role]
            store = TokenStore.of(x, codec, None, Heads((layer,), 0, len(x)))
            stats = prefix.stats[layer]
            assert stats.queries_QWD is not None
            o, other = (
                attention_output(stats.queries_QWD, side["keys"].float(), side["values"].float(), stats.scaling)
                for side in (exact, {**exact, role: store.read(torch.float32)})
            )
            moved[layer] += torch.stack([(other - o).square().sum(), o.square().sum()]).cpu()
    return {f"{role}.{layer}": (error / size.clamp(min=1e-30)).sqrt().float() for layer, (error, size) in moved.items()}


def attention_output(q_QWD: Tensor, k_HND: Tensor, v_HND: Tensor, scaling: float) -> Tensor:
    """Causal attention of the W newest of N tokens over all of them, fp32 [Q, W, D]."""
    (q, w, _), (h, n, _) = q_QWD.shape, k_HND.shape
    scores_HGWN = (q_QWD.float() * scaling).unflatten(0, (h, q // h)) @ k_HND.mT[:, None]  # type: ignore[no-untyped-call]
    hidden_WN = torch.ones(w, n, dtype=torch.bool, device=k_HND.device).triu(n - w + 1)
    out_HGWD: Tensor = scores_HGWN.masked_fill(hidden_WN, float("-inf")).softmax(-1) @ v_HND[:, None]
    return out_HGWD.flatten(0, 1)
