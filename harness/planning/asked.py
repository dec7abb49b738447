"""What a plan was asked for: its own keys among the overrides, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.configure.overrides import key_of, parsed, plain
from harness.errors import UserError, require
from harness.planning.gpus import GPUS

WEIGHTS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The keys of a plan that are not the run's.

    Attributes:
        seq: tokens of a context, one or several.
        batch: sequences at once, one or several.
        new: answer tokens of a sequence.
        page: tokens that an engine allocates at a time; 1 for none.
        gpu: names of accelerators to fit on.
        gpus: how many of one hold the model together.
        utilization: share of the memory for weights and caches, the default of serving engines.
        weights: dtype of the parameters; "" for the model's own.
        out: page to write; a table of the same name beside it.
    """

    seq: tuple[int, ...] = (4096, 32768, 131072)
    batch: tuple[int, ...] = (1,)
    new: int = 0
    page: int = 16
    gpu: tuple[str, ...] = ("h100_80gb",)
    gpus: int = 1
    utilization: float = 0.9
    weights: str = ""
    out: str = ""

    def __post_init__(self) -> None:
        for key in ("seq", "batch"):
            for number in getattr(self, key) or (0,):
                require(_whole(number) and number > 0, key, number, "a positive whole number, or a list of them")
        for key, least in (("new", 0), ("page", 1), ("gpus", 1)):
            number = getattr(self, key)
            require(_whole(number) and number >= least, key, number, f"a whole number, {least} or more")
        for name in self.gpu:
            require(name in GPUS, "gpu", name, f"known are {', '.join(GPUS)}; a list gpu=[a,b] plans for several")
        share = self.utilization
        ok = isinstance(share, int | float) and not isinstance(share, bool) and math.isfinite(share) and 0 < share <= 1
        require(ok, "utilization", share, "a share of the memory, above 0 and at most 1")
        require(not self.weights or self.weights in WEIGHTS, "weights", self.weights, f"one of {', '.join(WEIGHTS)}")
        require(isinstance(self.out, str), "out", self.out, "a file to write")


LISTS = ("seq", "batch", "gpu")
KEYS = tuple(Asked.__dataclass_fields__)


def divided(overrides: Sequence[str]) -> tuple[Asked, list[str]]:
    """(the plan's own keys, the overrides that are left: of model and stacks).

    Raises:
        UserError: a value that is not possible, or given twice.
    """
    own: dict[str, Any] = {}
    rest = []
    for text in overrides:
        key = key_of(text)
        if key not in KEYS:
            rest.append(text)
            continue
        require(key not in own, key, text.partition("=")[2], "given twice")
        own[key] = _value(key, text)
    return Asked(**own), rest


def _value(key: str, text: str) -> Any:
    override = parsed(text)
    if override.is_sweep_override():
        raise UserError(f"{text} is not possible: several values are a list, {key}=[a,b]")
    value = plain(override.value())
    if key not in LISTS:
        return value
    return tuple(plain(one) for one in value) if isinstance(value, list) else (value,)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
