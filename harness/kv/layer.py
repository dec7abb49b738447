"""What one row of a batch stores for some heads of some layers: encoded rows, exact tail, positions, scores.

It knows no model and no policy.

Stores are never changed in place: every method returns a new store that shares what it did not touch, so forks are cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from harness.stages.codec.protocol import Codec
from harness.stages.encoded import Encoded, Heads, RowIndex
from harness.types import KV, UserError

ALL = slice(None)


@dataclass(frozen=True)
class Side:
    """Keys or values of some heads: encoded chunks (oldest first), then exact tail rows, in the cache dtype.

    The first chunk is the compressed context and is never copied again; later rows are collected in a second one.
    view: a decoded copy of the chunks when the stack reads from a cache of decoded rows. written: elements encoded so far.
    """

    codec: Codec
    chunks: tuple[Encoded, ...]
    tail_HND: Tensor
    view_HND: Tensor | None = None
    written: int = 0

    @classmethod
    def of(cls, x_HND: Tensor, codec: Codec, view_dtype: torch.dtype | None, heads: Heads | None = None) -> Side:
        """Store rows: those that the codec does not keep exact are encoded. heads: whose they are, for its constants."""
        empty = x_HND.new_empty(x_HND.shape[0], 0, x_HND.shape[2])
        view = None if view_dtype is None else empty.to(view_dtype)
        return cls(codec, (), empty, view).append(x_HND, heads)

    @property
    def n_encoded(self) -> int:
        n = 0
        for chunk in self.chunks:
            n += chunk.n
        return n

    @property
    def n(self) -> int:
        return self.n_encoded + int(self.tail_HND.shape[1])

    @property
    def clipped(self) -> int:
        """Elements that the code range could not hold."""
        return int(sum(chunk.clipped for chunk in self.chunks))

    def append(self, x_HND: Tensor, heads: Heads | None = None) -> Side:
        """Add rows; they leave the tail once there are enough that are older than the residual, whatever the calls were."""
        rows = torch.cat((self.tail_HND, x_HND), 1) if self.tail_HND.shape[1] else x_HND
        ready = self.codec.leaving(rows.shape[1], self.n_encoded)
        if not ready:
            return replace(self, tail_HND=rows)
        whole = ready == rows.shape[1]
        old = rows if whole else rows[:, :ready].contiguous()
        codec = self.codec if self.chunks else self.codec.fit(old, heads or Heads((0,), 0, len(old)))
        new = codec.encode(old)
        _check_encoded(new, codec, rows.shape[0], ready)
        chunks = (*self.chunks[:1], self.chunks[1].cat(new)) if len(self.chunks) > 1 else (*self.chunks, new)
        view = self.view_HND
        if view is not None:
            fresh = view.new_empty(view.shape[0], new.n, view.shape[2])
            codec.decode(new, fresh)
            view = torch.cat((view, fresh), 1)
        tail = rows.new_empty(rows.shape[0], 0, rows.shape[2]) if whole else rows[:, ready:].clone()
        return Side(codec, chunks, tail, view, self.written + old.numel())

    def read(self, dtype: torch.dtype, heads: slice = ALL) -> Tensor:
        """All rows of these heads [H, N, D] in `dtype`."""
        tail = self.tail_HND[heads]
        out = torch.empty(tail.shape[0], self.n, tail.shape[2], dtype=dtype, device=tail.device)
        self.write_to(out, heads)
        return out

    def write_to(self, out_HND: Tensor, heads: slice = ALL) -> None:
        """Decode all rows of these heads into out_HND, in its dtype."""
        at = 0
        if self.view_HND is not None:
            at = self.view_HND.shape[1]
            out_HND[:, :at] = self.view_HND[heads]
        else:
            for chunk in self.chunks:
                found = chunk if heads == ALL else chunk.heads(heads.start, heads.stop)
                if self.codec.decode(found, out_HND[:, at : at + chunk.n]) is not None:  # type: ignore[func-returns-value]
                    raise TypeError(f"codec {self.codec.name}: decode must write into out_HND and return nothing")
                at += chunk.n
        if self.tail_HND.shape[1]:
            out_HND[:, at:] = self.tail_HND[heads]

    def exact(self) -> Tensor:
        """The rows of an exact side in the cache dtype; the very tensor when it is in one piece."""
        assert not self.codec.lossy and not self.tail_HND.shape[1]
        rows = [chunk.payload["rows"] for chunk in self.chunks]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def take(self, index_HM: Tensor, rows: RowIndex) -> Side:
        """Copy the rows index_HM; UserError when they cut into the exact tail (a layer's own budget may be small).

        rows: the same as a flat index, for a side without a tail.
        """
        n_tail = int(self.tail_HND.shape[1])
        if n_tail:
            self._check_tail(index_HM, n_tail)
            rows = RowIndex(index_HM[:, :-n_tail], rows.heads)
        view = None if self.view_HND is None else rows.of(self.view_HND)
        chunks = (self.chunks[0].take(rows, *self.chunks[1:]),) if self.chunks else ()
        codec = self.codec if rows.heads is None else self.codec.of_heads(rows.heads)
        return Side(codec, chunks, rows.of_heads(self.tail_HND), view, self.written)

    def _check_tail(self, index_HM: Tensor, n_tail: int) -> None:
        tail_M = torch.arange(self.n_encoded, self.n, device=index_HM.device)
        if index_HM.shape[1] < n_tail or not bool((index_HM[:, -n_tail:] == tail_M).all()):
            raise UserError(
                f"keep would evict from the {n_tail} exact newest rows of codec {self.codec.name}: raise keep.recent or the "
                "budget of the smallest layer, or lower the codec's residual"
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(byte kind, tensor) of everything held."""
        for chunk in self.chunks:
            yield from (("payload", t) for t in chunk.payload.values())
            yield from (("metadata", t) for t in chunk.metadata.values())
        for chunk in self.chunks[:1]:
            yield from (("metadata", t) for t in chunk.shared.values())
        yield "tail" if self.codec.lossy else "payload", self.tail_HND
        if self.view_HND is not None:
            yield "scratch", self.view_HND


def _check_encoded(new: Encoded, codec: Codec, heads: int, n: int) -> None:
    """A tensor without its own axis of heads and tokens would be cut or joined wrongly later, without a word."""
    wanted = sorted({n, n // codec.block})
    for name, tensor in {**new.payload, **new.metadata}.items():
        if tensor.shape[0] != heads or tensor.shape[1] not in wanted or new.n != n:
            raise UserError(
                f"codec {codec.name} encoded {n} rows of {heads} heads (Encoded.n={new.n}) with {name!r} of shape "
                f"{tuple(tensor.shape)}: its first two axes must be heads ({heads}) and tokens or blocks ({wanted})"
            )
    for name, tensor in new.shared.items():
        if tensor.shape[0] != heads:
            raise UserError(
                f"codec {codec.name} shares {name!r} of shape {tuple(tensor.shape)}: its first axis must be heads ({heads})"
            )


@dataclass(frozen=True)
class Part:
    """Rows of some KV heads that hold the same number of rows: all heads of some layers, or single heads of one.

    pos_HN: int32 original positions, None while the rows are contiguous up to the newest token (then nothing is stored).
    sums_HN: fp32 column sums, for scorers whose state lives on.
    """

    heads: Heads
    keys: Side
    values: Side
    pos_HN: Tensor | None = None
    sums_HN: Tensor | None = None

    @property
    def n(self) -> int:
        return self.keys.n

    def slot(self, layer: int) -> slice:
        """Where a layer's heads stand among this part's."""
        at = self.heads.layers.index(layer) * self.heads.each
        return slice(at, at + self.heads.each)

    def append(self, new: KV, sums_HN: Tensor | None) -> Part:
        """Add new rows of these heads; sums_HN [H, N + L] are this forward's attention sums, if recorded."""
        pos, sums = self.pos_HN, self.sums_HN
        if pos is not None:
            pos = torch.cat((pos, new.pos_HN), 1)
        if sums is not None:
            assert sums_HN is not None
            sums = torch.nn.functional.pad(sums, (0, new.n)) + sums_HN
        keys, values = self.keys.append(new.k_HND, self.heads), self.values.append(new.v_HND, self.heads)
        return Part(self.heads, keys, values, pos, sums)

    def positions(self, seen: int) -> Tensor:
        """int32 [H, N] original positions; the newest row stands at seen - 1."""
        if self.pos_HN is not None:
            return self.pos_HN
        contiguous = torch.arange(seen - self.n, seen, dtype=torch.int32, device=self.keys.tail_HND.device)
        return contiguous.expand(self.heads.n, self.n)

    def take(self, index_HM: Tensor, seen: int, layers: tuple[int, ...] | None = None, head: int | None = None) -> Part:
        """Copy the rows index_HM (int64 [H, M]) and their positions and sums, of all heads or of some.

        layers: only these; head: only this KV head (counted from the part's first) of a single layer.
        """
        layers = layers or self.heads.layers
        rows = RowIndex(index_HM, self._some(layers, head, index_HM.device))
        start, stop = self.heads.start, self.heads.stop
        heads = Heads(layers, start, stop) if head is None else Heads(layers, start + head, start + head + 1)
        pos = rows.of(self.positions(seen))
        sums = None if self.sums_HN is None else rows.of(self.sums_HN)
        return Part(heads, self.keys.take(index_HM, rows), self.values.take(index_HM, rows), pos, sums)

    def _some(self, layers: tuple[int, ...], head: int | None, device: torch.device) -> Tensor | None:
        if layers == self.heads.layers and head is None:
            return None
        starts = [self.slot(layer).start for layer in layers]
        chosen = [at + h for at in starts for h in (range(self.heads.each) if head is None else [head])]
        return torch.tensor(chosen, device=device)

    def rest(self, layers: tuple[int, ...]) -> Part:
        """All rows of some of the layers, copied."""
        if layers == self.heads.layers:
            return self
        h = len(layers) * self.heads.each
        every = torch.arange(self.n, device=self.keys.tail_HND.device).expand(h, -1)
        kept = self.take(every, self.n, layers)
        return kept if self.pos_HN is not None else replace(kept, pos_HN=None)

    def newest(self, n: int) -> Part:
        """The last n rows of a contiguous part with exact codecs: what sliding-window layers hold on to."""

        def cut(side: Side) -> Side:
            rows = side.exact()
            return Side.of(rows[:, rows.shape[1] - n :].clone(), side.codec, None)

        return self if self.n <= n else replace(self, keys=cut(self.keys), values=cut(self.values))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(byte kind, tensor) of everything held."""
        yield from self.keys.tensors()
        yield from self.values.tensors()
        if self.pos_HN is not None:
            yield "positions", self.pos_HN
        if self.sums_HN is not None:
            yield "state", self.sums_HN


class Slot(NamedTuple):
    """Some heads of one layer: the part that stores them, and where they stand in it."""

    part: Part
    at: slice
