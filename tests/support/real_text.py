"""Keys, values and queries of the default model on real text, read once, and what its projections were given and gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from harness.calibrate.calibration_text import CalibrationText
from harness.calibrate.codec_limits import calibrated
from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.kv.sequence_cache import SequenceCache
from harness.models.load import LM
from harness.stages.protocols import Needs
from harness.stages.stack import Stack
from tests.support import conf_tree

CALIBRATION = {"tokens": 704, "window": 704}  # more tokens than a projection has inputs: their second moments have full rank
SIDES = {"keys": "k_proj", "values": "v_proj"}
Rows = dict[str, Tensor]


class Once(Engine):
    """Reads every text once, and records all that anyone asks for."""

    def prefill(self, ids: Sequence[int], needs: Needs = Needs(), length: int = 0) -> Prefix:  # noqa: B008 frozen
        """As of Engine."""
        found: dict[tuple[int, ...], Prefix] = self.__dict__.setdefault("found", {})
        if tuple(ids) not in found:
            found[tuple(ids)] = super().prefill(ids, conf_tree.everything(), length)
        return found[tuple(ids)]


@dataclass(frozen=True)
class Text:
    """One text. inputs: of a layer's projections [N, 576], by layer; outputs: their rows [H, N, D], ROLE.LAYER, before RoPE."""

    prefix: Prefix
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: Rows = field(default_factory=dict)

    def exact(self, role: str, layer: int) -> Tensor:
        """Exact rows [H, N, D] as they are stored, keys after RoPE."""
        return stored(self.prefix.row, role, layer)


@dataclass(frozen=True)
class Real:
    """The default model, a context, and the calibration text of every stack that `read` makes."""

    lm: LM
    engine: Once
    context: Text
    calibration: Text

    @classmethod
    def of(cls, lm: LM, layers: Sequence[int], tokens: int) -> Real:
        """Read both texts: the first `tokens` of Genesis, and the start of the standard library's."""
        engine = Once(lm.model, torch.float32)
        wanted = conf_tree.instantiate(conf_tree.config("codec", "low_rank")["calibration"] | CALIBRATION, _convert_="all")
        (window,) = CalibrationText.of(lm, wanted).windows
        prose = conf_tree.instantiate(OmegaConf.load(conf_tree.CONF / "corpus" / "kjv.yaml"))
        ids = lm.tokens.encode(prose.documents()[0][: 10 * tokens])[:tokens]
        return cls(lm, engine, *(_read(engine, layers, some) for some in (ids, window)))

    def weight(self, role: str, layer: int) -> Tensor:
        """A projection [H * D, 576]."""
        found: Tensor = getattr(self.lm.model.model.layers[layer].self_attn, SIDES[role]).weight.detach()
        return found

    def stack(self, name: str, *changes: str) -> Stack:
        """A member of conf/compress, calibrated."""
        plain = conf_tree.config("compress", name)
        asks = [part for part in ("keys", "values", "share") if (plain.get(part) or {}).get("calibration")]
        small = [f"{part}.calibration.{key}={value}" for part in asks for key, value in CALIBRATION.items()]
        made = conf_tree.instantiate(conf_tree.config("compress", name, *small, *changes), _convert_="all")
        return calibrated(made, self.engine, self.lm)

    def read(self, name: str, *changes: str) -> SequenceCache:
        """The context under it."""
        return self.engine.compress(self.context.prefix, self.stack(name, *changes), seed=3)


def stored(row: SequenceCache, role: str, layer: int) -> Tensor:
    """What all heads of a layer read of its store, fp32 [H, N, D]; keys before RoPE where they are stored so."""
    found = []
    for slot in row.slots[layer]:
        store = getattr(slot, role)
        out = torch.empty(slot.heads.stop - slot.heads.start, store.n, row.shape.layers[layer].d_key)
        store.write_to(out, slot.at)
        found.append(out)
    return torch.cat(found)


def _read(engine: Once, layers: Sequence[int], ids: Sequence[int]) -> Text:
    """Read a text, and write down what the projections of these layers were given and gave."""
    inputs: dict[int, Tensor] = {}
    outputs: Rows = {}

    def note(layer: int, role: str) -> Callable[[Any, Any, Tensor], None]:
        def hook(module: Any, given: tuple[Tensor], made: Tensor) -> None:
            inputs[layer] = given[0][0].clone()
            outputs[f"{role}.{layer}"] = made[0].unflatten(-1, (-1, 64)).transpose(0, 1).clone()  # type: ignore[no-untyped-call]

        return hook

    with _hooked(engine, [(layer, role, note(layer, role)) for layer in layers for role in SIDES]):
        return Text(engine.prefill(ids), inputs, outputs)


@contextmanager
def _hooked(engine: Once, hooks: Sequence[tuple[int, str, Callable[[Any, Any, Tensor], None]]]) -> Iterator[None]:
    layers: Any = engine.model.model.layers
    made = [getattr(layers[i].self_attn, SIDES[role]).register_forward_hook(hook) for i, role, hook in hooks]
    try:
        yield
    finally:
        for one in made:
            one.remove()
