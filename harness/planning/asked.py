"""What a plan was asked for: its own keys among the overrides, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.configure.arguments import check_arguments
from harness.configure.overrides import own_keys, plain, single
from harness.errors import require
from harness.files.paths import page_path
from harness.planning.gpus import GPUS

MOST = 1 << 30  # tokens, sequences, accelerators: beyond, nothing is planned
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
                fits = _whole(number) and 0 < number <= MOST
                require(fits, key, number, "a positive whole number up to 2^30, or a list of them")
        for key, least in (("new", 0), ("page", 1), ("gpus", 1)):
            number = getattr(self, key)
            require(_whole(number) and least <= number <= MOST, key, number, f"a whole number from {least} to 2^30")
        require(bool(self.gpu), "gpu", [], f"known are {', '.join(GPUS)}")
        for name in self.gpu:
            is_known = isinstance(name, str) and name in GPUS
            require(is_known, "gpu", name, f"known are {', '.join(GPUS)}; a list gpu=[a,b] plans for several")
        share = self.utilization
        ok = isinstance(share, int | float) and not isinstance(share, bool) and math.isfinite(share) and 0 < share <= 1
        require(ok, "utilization", share, "a share of the memory, above 0 and at most 1")
        known = isinstance(self.weights, str) and self.weights in ("", *WEIGHTS)
        require(known, "weights", self.weights, f"one of {', '.join(WEIGHTS)}")
        require(isinstance(self.out, str), "out", self.out, "a file to write")
        _ = self.page_file  # what is read here is checked

    @property
    def page_file(self) -> Path | None:
        """Where the page goes; None for none."""
        return page_path("out", self.out, (".csv",)) if self.out else None


LISTS = ("seq", "batch", "gpu")
READ = ("model", "compress", "stacks", "experiment")  # of a run


def divided(overrides: Sequence[str]) -> tuple[Asked, list[str]]:
    """(the plan's own keys, the overrides that are left: of model and stacks).

    Raises:
        UserError: a value that is not possible, or given twice; a key of a run that a plan does not read.
    """
    own, rest = own_keys(overrides, Asked.__dataclass_fields__, READ)
    check_arguments(rest)
    return Asked(**{key: _value(key, text) for key, text in own.items()}), rest


def _value(key: str, text: str) -> Any:
    value = single(text, f"several values are a list, {key}=[a,b]")
    if key not in LISTS:
        return value
    return tuple(dict.fromkeys(map(_hashable, value))) if isinstance(value, list) else (value,)


def _hashable(value: object) -> object:
    """A member of a list, whatever was written there; what is no number or name is refused later."""
    value = plain(value)
    return value if isinstance(value, int | float | str) else repr(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
