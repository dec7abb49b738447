"""Bytes of recorded arms at another length and batch: planned from shapes where the model's are known, else scaled."""

from __future__ import annotations

from dataclasses import dataclass

from harness.advice.evidence import Arm, Evidence
from harness.configure.kinds import of_kind
from harness.configure.trusted import Builder
from harness.errors import UserError
from harness.kv.shape import ModelShape
from harness.models.load import DTYPES, ModelSpec
from harness.planning.sizes import size
from harness.planning.whole_shape import whole_shape
from harness.stages.stack import Stack


@dataclass(frozen=True)
class Sizes:
    """Bytes of the arms of one run at a length. planned: from the model's shape; else the measured share of the full cache.

    full: bytes of the full cache of one sequence; None where the shape is not known either.
    """

    shape: ModelShape | None
    itemsize: int
    seq: int
    why: str = ""

    def of(self, arm: Arm) -> float | None:
        """Bytes of one sequence under the arm, the upper bound where there are bounds; None where they cannot be known."""
        if self.shape is None:
            return None
        try:
            stack = Builder()(dict(arm.stack_config), "stack")
            assert isinstance(stack, Stack)
            return size(stack, self.shape, self.seq, self.itemsize).high
        except UserError:  # a part from outside the project, or a budget too small for this length: the measured share
            return arm.ratio * self.full

    @property
    def full(self) -> int:
        """Bytes of the full cache of one sequence."""
        assert self.shape is not None
        return self.shape.full_bytes(self.seq, self.itemsize)


def sizes(found: Evidence, seq: int) -> Sizes:
    """What is needed to size the arms of a run; without its model's configuration nothing can be, and `why` says so."""
    try:
        spec = of_kind(Builder()(found.manifest.get("config", {}).get("model"), "model"), ModelSpec, "model")
        shape = whole_shape(spec.config(), DTYPES[spec.dtype])
    except UserError as error:
        return Sizes(None, 2, seq, f"the shape of {found.model} is not known here ({error})")
    return Sizes(shape, DTYPES[spec.kv_dtype].itemsize, seq)
