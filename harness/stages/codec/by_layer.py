"""Bits by layer: a codec that is another one in each layer, by a list or by a rule with a given mean of bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import floor

import torch
from torch import Tensor

from harness.errors import UserError, require
from harness.fields import read_as
from harness.stages.codec.base import Codec
from harness.stages.encoded import Encoded, Heads
from harness.stages.limits import Calibration, Limits

RULES = ("sensitive", "first", "last")


@dataclass(frozen=True, kw_only=True)
class ByLayer(Codec):
    """Each layer that the stack compresses has one of `codecs`, for keys and values apart (kvpress: none).

    layers: a list with the name of a codec for each layer that is compressed, first to last; or a rule: "sensitive", "first"
        and "last" give more bits to the most sensitive layers (see below), to the first, or to the last ones.
    mean_bits: of a rule: the mean over layers of the codecs' bits is as near to it as whole layers allow, and not above. Two
        codecs are used, the ones that it lies between. Bits are those of the codes; metadata and exact tokens are in the bytes.

    "sensitive" is KVTuner's order (arXiv 2502.04420) in a small form: layers are ranked by the relative error of their
    attention output when only their keys (or only their values) are stored by the cheaper codec, on calibration text.
    A variant: KVTuner's candidates are pairs of key and value bits of 8, 4 and 2. Of each layer it keeps those that no other
    pair beats in both bits and error, groups layers that keep the same pairs with like errors, and searches a pair for each
    group by the scores of a task. Here keys and values are ranked apart, two widths are used, no task is run, a mean is met.

    Storages are those of the chosen codecs: layers with other codecs are other tensors. A store always holds one of `codecs`;
    asked by itself this codec answers as the one with the most bits.
    """

    name: str = "by_layer"
    codecs: Mapping[str, Codec]
    layers: tuple[str, ...] | str = read_as(lambda codec, given: given if isinstance(given, str) else tuple(given), "sensitive")
    mean_bits: float | None = None
    calibration: Calibration | None = read_as(lambda codec, given: given if codec.layers == "sensitive" else None, None)
    limits: Limits | None = field(default=None, repr=False, compare=False)  # a sensitivity a layer; set by `calibrated`

    def __post_init__(self) -> None:
        known = ", ".join(self.codecs)
        require(bool(self.codecs), "codec.codecs", dict(self.codecs), "codecs by name")
        for name, codec in self.codecs.items():
            simple = not isinstance(codec, ByLayer) and codec.calibration is None
            require(simple, f"codec.codecs.{name}", codec.name, "a codec that needs no calibration and is one in all layers")
        if not isinstance(self.layers, str):
            wrong = next((one for one in self.layers if one not in self.codecs), None)
            require(bool(self.layers) and wrong is None, "codec.layers", wrong, f"a list of {known}, one for each layer")
            require(self.mean_bits is None, "codec.mean_bits", self.mean_bits, "null: a list of layers says it")
            return
        require(self.layers in RULES, "codec.layers", self.layers, f"allowed are {', '.join(RULES)}, or a list of {known}")
        bits = [_bits(one) for one in self.codecs.values()]
        require(all(bits), "codec.codecs", known, "codecs with a number of bits; only a list of layers may name others")
        least, most = min(bits), max(bits)
        ok = isinstance(self.mean_bits, int | float) and least <= self.mean_bits <= most
        require(ok, "codec.mean_bits", self.mean_bits, f"a number from {least} to {most}, the bits of {known}")
        if self.layers == "sensitive":
            require(self.calibration is not None, "codec.calibration", None, "codec.layers=sensitive needs it")

    # --- which codec a layer has ---------------------------------------------------------------------------------------

    def chosen(self, layers: Sequence[int]) -> tuple[str, ...]:
        """The name of the codec of each of these layers, all that the stack compresses, in order.

        Raises:
            UserError: a list for another number of layers, or a rule whose sensitivities were not measured.
        """
        key = tuple(layers)
        if key not in self._found:
            self._found[key] = self._choose(key)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        return {}

    def _choose(self, layers: tuple[int, ...]) -> tuple[str, ...]:
        if not isinstance(self.layers, str):
            n = len(self.layers)
            require(
                n == len(layers), "codec.layers", f"{n} layers", f"a codec for each of the {len(layers)} that are compressed"
            )
            return self.layers
        low, high = self.between
        spread = _bits(self.codecs[high]) - _bits(self.codecs[low])
        more = floor(len(layers) * (Fraction(str(self.mean_bits)) - _bits(self.codecs[low])) / spread) if spread else 0
        rich = set(self.order(layers)[:more])
        return tuple(high if layer in rich else low for layer in layers)

    @property
    def between(self) -> tuple[str, str]:
        """The names of the two codecs whose bits the mean lies between."""
        mean, ranked = self.mean_bits or 0, sorted(self.codecs, key=lambda name: _bits(self.codecs[name]))
        low = [name for name in ranked if _bits(self.codecs[name]) <= mean][-1]
        return low, next((name for name in ranked if _bits(self.codecs[name]) > mean), low)

    def order(self, layers: Sequence[int]) -> list[int]:
        """Layers in the order in which they get more bits; UserError where that was not measured."""
        if self.layers != "sensitive":
            return list(layers) if self.layers == "first" else list(reversed(layers))
        if self.limits is None:
            raise UserError(f"codec {self.name} has no calibration table; codec.layers=first or last needs none")
        found = self.limits.by_layer
        return sorted(layers, key=lambda layer: (-float(found[layer]) if layer in found else 0.0, layer))

    def calibrated(self, limits: Limits) -> ByLayer:
        """With the measured sensitivity of every layer."""
        return replace(self, limits=limits)

    def for_role(self, role: str) -> ByLayer:
        """With the codecs of "keys" or of "values"."""
        return replace(self, codecs={name: codec.for_role(role) for name, codec in self.codecs.items()})

    def info(self) -> dict[str, object]:
        about = {"calibration": dict(self.limits.about)} if self.limits else {}
        rule = {"layers": self.layers if isinstance(self.layers, str) else list(self.layers)}
        mean = {} if self.mean_bits is None else {"bits": self.mean_bits}
        infos = {name: codec.info() for name, codec in self.codecs.items()}
        alike: dict[str, object] = {key: one[key] for key in ("scale", "clipped") for one in infos.values() if key in one}
        alike = {key: value for key, value in alike.items() if all(one.get(key) == value for one in infos.values())}
        return {"codec": self.name, **mean, **rule, **alike, "codecs": infos, **about}

    def check(self, head_dim: int) -> None:
        """Each codec's own check."""
        for codec in self.codecs.values():
            codec.check(head_dim)

    # --- as a codec of its own: the one with the most bits -------------------------------------------------------------

    @property
    def _richest(self) -> Codec:
        return max(self.codecs.values(), key=_bits)

    @property
    def block(self) -> int:
        return self._richest.block

    @property
    def flush(self) -> int:
        return self._richest.flush

    @property
    def residual(self) -> int:
        return self._richest.residual

    @property
    def sinks(self) -> int:
        return self._richest.sinks

    @property
    def lossy(self) -> bool:
        return any(codec.lossy for codec in self.codecs.values())

    @property
    def by_tokens(self) -> bool:
        return self._richest.by_tokens

    def leaving(self, tail: int, encoded: int) -> int:
        return self._richest.leaving(tail, encoded)

    def fit(self, x_HND: Tensor, heads: Heads) -> Codec:
        return self._richest.fit(x_HND, heads)

    def encode(self, x_HND: Tensor) -> Encoded:
        return self._richest.encode(x_HND)

    def decode(self, e: Encoded, out_HND: Tensor) -> None:
        self._richest.decode(e, out_HND)

    def nbytes(self, h: int, n: int, d: int, itemsize: int) -> tuple[int, int]:
        return self._richest.nbytes(h, n, d, itemsize)


def _bits(codec: Codec) -> int:
    found = codec.info().get("bits", 0)
    return found if isinstance(found, int) else 0


def codecs_of(codec: Codec) -> tuple[Codec, ...]:
    """The codecs that stores may have under this one: itself, or those that it chooses from by layer."""
    return tuple(codec.codecs.values()) if isinstance(codec, ByLayer) else (codec,)


def of_layer(codec: Codec, layer: int, layers: Sequence[int]) -> Codec:
    """The codec of one of the layers that a stack compresses."""
    return codec.codecs[codec.chosen(layers)[tuple(layers).index(layer)]] if isinstance(codec, ByLayer) else codec


def as_if_measured(codec: Codec) -> Codec:
    """For sizes, which do not depend on which layers get more bits: a codec that waits for sensitivities gets equal ones."""
    waits = isinstance(codec, ByLayer) and codec.calibration is not None and codec.limits is None
    return codec.calibrated(Limits(dict[int, torch.Tensor]())) if waits else codec
