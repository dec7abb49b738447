"""A plan as one table: a line for every stack, length and batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from harness.analysis.labels import label_of
from harness.configure.arms import Arm
from harness.errors import UserError
from harness.planning.architecture import Architecture
from harness.planning.asked import WEIGHTS, Asked
from harness.planning.cautions import of_length, of_room, of_stack
from harness.planning.fits import Room, Serving, longest, most_sequences
from harness.planning.gpus import gpu
from harness.planning.sizes import Size, size


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a model's cache takes.

    Attributes:
        sizes: columns stack, seq, batch, kv_bytes, kv_bytes_low (equal to kv_bytes where it is exact), exact, kv_bytes_paged,
            ratio (to the full cache), bytes_per_token, and one for each kind of bytes; of all `batch` sequences together.
        fits: columns gpu, room (bytes left beside the weights), stack, seq, sequences; and longest, the context of which the
            first batch fits.
        cautions: what no number of this table says.
        refused: stacks that are not possible, with the reason.
    """

    sizes: pd.DataFrame
    fits: pd.DataFrame
    cautions: tuple[str, ...]
    refused: tuple[str, ...]


def name_of(arm: Arm) -> str:
    """What tables of runs call the stack at its point."""
    return label_of({"stack": arm.label, "stack_config": arm.config, "point": arm.point})


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans one model. itemsize: bytes of an element in the cache dtype. weight: bytes of a parameter, mostly."""

    model: Architecture
    itemsize: int
    weight: float

    def plan(self, arms: Sequence[Arm], asked: Asked) -> Plan:
        """The table of these stacks. UserError where none of them is possible."""
        refused: dict[str, str] = {}
        sizes = [line for arm in arms for line in self._lines(arm, asked, refused)]
        if not sizes:
            raise UserError("; ".join(refused.values()))
        rooms = [self._room(name, asked) for name in asked.gpu]
        fits = [line for room in rooms for arm in arms for line in self._fits(room, arm, asked)]
        cautions = [
            *(line for room in rooms for line in of_room(room)),
            *of_length(max(asked.seq) + asked.new, self.model.positions),
            *(f"{arm.label}: {line}" for arm in arms for line in of_stack(arm.stack, self.model.shape, rooms)),
        ]
        return Plan(
            sizes=pd.DataFrame(sizes).fillna(0),
            fits=pd.DataFrame(fits),
            cautions=tuple(dict.fromkeys(cautions)),
            refused=tuple(refused.values()),
        )

    def _lines(self, arm: Arm, asked: Asked, refused: dict[str, str]) -> Iterator[dict[str, object]]:
        for seq in asked.seq:
            try:
                one, paged = (self._size(arm, seq, asked.new, page) for page in (1, asked.page))
            except UserError as error:
                refused[f"{arm.name} {seq}"] = f"{arm.name} at {seq} tokens: {error}"
                continue
            full = self.model.shape.full_bytes(seq + asked.new, self.itemsize)
            for batch in asked.batch:
                yield {
                    "model": self.model.name,
                    "stack": name_of(arm),
                    "seq": seq,
                    "new": asked.new,
                    "batch": batch,
                    "kv_bytes": batch * one.high,
                    "kv_bytes_low": batch * one.low,
                    "exact": one.exact,
                    "kv_bytes_paged": batch * paged.high,
                    "ratio": one.high / full,
                    "bytes_per_token": one.high / (seq + asked.new),
                } | {kind: batch * count for kind, count in one.kinds.items()}

    def _size(self, arm: Arm, seq: int, new: int, page: int) -> Size:
        return size(arm.stack, self.model.shape, seq, self.itemsize, new, page)

    def _room(self, name: str, asked: Asked) -> Room:
        weight = WEIGHTS.get(asked.weights, self.weight)
        parameters = int(self.model.parameters * weight)
        return Room(gpu=gpu(name), number=asked.gpus, utilization=asked.utilization, parameters=parameters)

    def _fits(self, room: Room, arm: Arm, asked: Asked) -> Iterator[dict[str, object]]:
        serving = Serving(itemsize=self.itemsize, page=asked.page, new=asked.new)
        shape, limit = self.model.shape, self.model.positions or max(asked.seq)
        for seq in asked.seq:
            try:
                count = most_sequences(room.bytes, arm.stack, shape, seq, serving)
            except UserError:
                continue
            yield {
                "model": self.model.name,
                "gpu": room.gpu.name,
                "gpus": room.number,
                "room": room.bytes,
                "stack": name_of(arm),
                "seq": seq,
                "sequences": count,
                "longest": longest(room.bytes, arm.stack, shape, asked.batch[0], serving, limit) if room.bytes > 0 else 0,
            }
