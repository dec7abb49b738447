"""The protocol of sharing: which layers and KV heads have a store of their own, and what the others read.

To add one: one class that inherits from it, one YAML in `conf/share` with its `_target_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from harness.errors import UserError
from harness.stages.limits import Calibration


class Bases(NamedTuple):
    """Orthogonal matrices of a layer's H heads, [H, D, D] fp32: head h is stored as x_h @ basis_h."""

    keys: Tensor
    values: Tensor


class Widths(NamedTuple):
    """Numbers a token that a layer stores in place of its keys and values: a rotated part of the keys, and a latent."""

    rotated: int
    latent: int


class Maps(NamedTuple):
    """From a layer's H keys and values to a rotated part of R vectors of D channels and a latent of C numbers, and back.

    up: what reads them, stored with the cache. keys [H, D, R]: head h's rotated channel d is sum_r keys[h, d, r] part[r, d].
    values [H, D + D', C]: its key without rotation and its value, of the latent. down_HEC: the latent's, [H, D + D', C]. fp32.
    """

    up: Bases
    down_HEC: Tensor


class Mixed(NamedTuple):
    """How the heads of a layer are mixed, and the components of what is not rotated.

    turns: fp32 [D, H, H], of every key channel the mix of heads, in columns. vectors: fp32 [E, E], principal components of what
    is not rotated of all keys, divided by `ratio`, and values, E = H * (D + D'). ratio: fp32 [].
    """

    turns: Tensor
    vectors: Tensor
    ratio: Tensor


@dataclass(frozen=True)
class Measured:
    """What was measured on calibration text: tensors by name, and where, for the record."""

    tables: Mapping[str, Tensor]
    about: Mapping[str, object]

    def basis(self, name: str, heads: int, d: int) -> Tensor:
        """The bases [H, D, D] of a layer's heads; UserError if they are of another model."""
        found = self.tables.get(name)
        if found is None or tuple(found.shape) != (heads, d, d):
            raise UserError(f"the calibration table has no {name} for {heads} heads of {d} channels")
        return found

    def mixed(self, layer: int, heads: int, d_key: int, d_value: int) -> Mixed:
        """How a layer's heads are mixed; UserError if the table is of another model."""
        turns, vectors, ratio = (self.tables.get(f"{name}.{layer}") for name in Mixed._fields)
        size = heads * (d_key + d_value)
        if turns is None or vectors is None or ratio is None or (len(turns), len(vectors)) != (d_key, size):
            raise UserError(f"the calibration table has no layer {layer} of {heads} heads of {d_key} and {d_value} channels")
        return Mixed(turns, vectors, ratio)

    def similarity(self, one: int, other: int) -> float:
        """How similar two layers are."""
        return float(self.tables[f"similarity.{one}"][other])


class Share(Protocol):
    """Inherit and write the methods of what is shared: heads, layers, or the directions of pairs of layers.

    Layers are given as `layers`: those with full attention and one shape, in the order of the model. What is shared is made
    when a token is stored; in the forward that computes it, every layer and head attends to its own.
    """

    def heads(self, heads: int) -> int:
        """Stored heads of a layer with so many KV heads, a divisor; neighbours are averaged into one."""
        return heads

    def owners(self, layers: Sequence[int]) -> Mapping[int, int]:
        """For layers without a store, the earlier layer that they read."""
        return {}

    def pairs(self, layers: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Layers (lower, upper) whose directions are merged into one."""
        return ()

    @property
    def merges(self) -> bool:
        """Whether directions of pairs of layers are merged."""
        return False

    @property
    def pools(self) -> bool:
        """Whether heads are averaged or mixed, so that what is stored are others than the model's."""
        return False

    @property
    def t(self) -> float:
        """Of merged directions, the share of the upper layer's."""
        return 0.5

    @property
    def unmerged(self) -> Fraction:
        """The share of tokens that merged layers also keep whole."""
        return Fraction(0)

    @property
    def aligned(self) -> bool:
        """Whether heads are turned by `bases` before they are averaged."""
        return False

    def bases(self, layer: int, heads: int, d_key: int, d_value: int) -> Bases | None:
        """The bases of a layer's heads; None if they are averaged as they are."""
        return None

    @property
    def folds(self) -> bool:
        """Whether a layer stores a rotated part of its keys and a latent, whose sizes are its `widths`."""
        return False

    def widths(self, heads: int, d_key: int, d_value: int) -> Widths:
        """Sizes of the two parts, of a layer with so many KV heads; UserError if they are not possible."""
        raise NotImplementedError

    def maps(self, layer: int, heads: int, d_key: int, d_value: int, device: torch.device) -> Maps:
        """How a layer's keys and values become the two parts, and the way back, on a device."""
        raise NotImplementedError

    @property
    def calibration(self) -> Calibration | None:
        """The text to measure on before anything is shared; None if nothing is measured."""
        return None

    def fitted(self, measured: Measured) -> Share:
        """Itself with what was measured."""
        return self

    def info(self) -> dict[str, object]:
        """For the record."""
        return {"share": self.words}

    @property
    def words(self) -> str:
        """For labels."""
        return type(self).__name__.lower()
