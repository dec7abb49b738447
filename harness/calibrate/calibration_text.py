"""Calibration text as windows of tokens, their exact keys and values, and tables kept in the user cache by content hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file
from torch import Tensor

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.files.package_data import cache_root, once, sha256_of
from harness.models.load import LM
from harness.stages.limits import Calibration

ROLES = ("keys", "values")


@dataclass(frozen=True)
class CalibrationText:
    """The start of a text, in windows that begin as the model expects. model: its identity."""

    wanted: Calibration
    windows: tuple[tuple[int, ...], ...]
    model: Mapping[str, object]

    @classmethod
    def of(cls, lm: LM, wanted: Calibration) -> CalibrationText:
        """The text that a calibration names, in the model's tokens; UserError if it cannot be had."""
        return cls(wanted, tuple(map(tuple, _windows(lm, wanted))), dict(lm.identity))

    @property
    def about(self) -> dict[str, object]:
        """For the record."""
        return {
            "corpus": self.wanted.corpus.name,
            "corpus_sha256": self.wanted.corpus.digest,
            "tokens": sum(len(w) for w in self.windows),
            "window": self.wanted.window,
            "percentile": float(self.wanted.percentile),
        }

    def table(
        self, engine: Engine, name: str, how: Mapping[str, object], measure: Callable[[], dict[str, Tensor]]
    ) -> tuple[dict[str, Tensor], dict[str, object]]:
        """(tensors, what the record says of them), measured the first time they are asked for.

        name: of the file. how: what else they depend on; part of their address.

        Raises:
            UserError: they are not there and the model has no weights, or they are not those that the configuration pins.
        """
        ids = hashlib.sha256(repr([list(w) for w in self.windows]).encode()).hexdigest()
        address = json.dumps({**how, "model": self.model, **self.about, "ids": ids}, sort_keys=True)
        target = cache_root() / "calibration" / hashlib.sha256(address.encode()).hexdigest()[:16]

        def build(folder: Path) -> None:
            if engine.device.type == "meta":
                raise UserError("codec.calibration: its limits are not measured yet, which takes the model's weights")
            save_file(measure(), folder / name)

        said = f"measuring keys and values on {self.about['tokens']} tokens of {self.wanted.corpus.name}"
        file = once(target, build, said) / name
        table = sha256_of(file)
        if self.wanted.table not in (None, table):
            raise UserError(f"codec.calibration.table={self.wanted.table!r} is not possible: this model and text give {table}")
        return load_bytes(file.read_bytes()), {**self.about, "table": table}  # a mapped file could change under a long run


def exact_rows(engine: Engine, ids: Sequence[int], *, unrotated: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(ROLE.LAYER, exact rows [h, N, D]) of one window and every full layer; unrotated: keys before RoPE."""
    row = engine.prefill(ids).row
    for layer in engine.shape.full_layers:
        ((part, at),) = row.slots[layer]
        keys = part.keys.exact()[at]
        if unrotated:
            rope = engine.ropes[layer]
            assert rope is not None, "stacks that ask for keys before RoPE are refused for such a model"
            keys = rope.unrotate(keys, torch.arange(len(ids), device=keys.device))
        yield f"keys.{layer}", keys
        yield f"values.{layer}", part.values.exact()[at]


def of_role(tensors: Mapping[str, Tensor], role: str, what: str = "") -> dict[int, Tensor]:
    """The tensors of "keys" or "values" by layer, from names ROLE.LAYER, or ROLE.LAYER.WHAT."""
    end = f".{what}" if what else ""
    named = {name.removesuffix(end): t for name, t in tensors.items() if name.endswith(end)}
    return {int(name.split(".")[1]): t for name, t in named.items() if name.startswith(f"{role}.")}


def _windows(lm: LM, wanted: Calibration) -> Iterator[list[int]]:
    """Token ids of the text's start, in windows that begin as the model expects."""
    ids: list[int] = []
    for document in wanted.corpus.documents():
        ids += lm.tokens.encode(document + "\n\n")
        if len(ids) >= wanted.tokens:
            break
    ids = ids[: wanted.tokens]
    bos = list(lm.tokens.bos_ids)
    size = min(wanted.window, lm.tokens.max_length or wanted.window) - len(bos)
    if size < 1:
        raise UserError(f"codec.calibration.window={wanted.window} is not possible: it must exceed the model's first token")
    return ([*bos, *ids[at : at + size]] for at in range(0, len(ids), size))
