"""What one row of a batch stores in one layer: encoded rows, exact tail, positions, scores. It knows no model and no policy.

Stores are never changed in place: every method returns a new store that shares what it did not touch, so forks are cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.stages.encoded import Encoded, RowIndex
from harness.stages.protocols import Codec
from harness.types import KV, UserError


@dataclass(frozen=True)
class Side:
    """Keys or values of some heads: encoded chunks (oldest first), then exact tail rows, in the cache dtype.

    The first chunk is the compressed context and is never copied again; later rows are collected in a second one.
    view: a decoded copy of the chunks when the stack reads from a cache of decoded rows.
    """

    codec: Codec
    chunks: tuple[Encoded, ...]
    tail_HND: Tensor
    view_HND: Tensor | None = None

    @classmethod
    def of(cls, x_HND: Tensor, codec: Codec, view_dtype: torch.dtype | None) -> Side:
        """Store rows: whole blocks beyond the codec's residual are encoded, the rest stays exact."""
        empty = x_HND.new_empty(x_HND.shape[0], 0, x_HND.shape[2])
        view = None if view_dtype is None else empty.to(view_dtype)
        return cls(codec, (), empty, view).append(x_HND)

    @property
    def n_encoded(self) -> int:
        n = 0
        for chunk in self.chunks:
            n += chunk.n
        return n

    @property
    def n(self) -> int:
        return self.n_encoded + int(self.tail_HND.shape[1])

    def append(self, x_HND: Tensor) -> Side:
        """Add rows; a block leaves the tail once it is full and older than the residual, whatever the calls were."""
        rows = torch.cat((self.tail_HND, x_HND), 1) if self.tail_HND.shape[1] else x_HND
        ready = max(rows.shape[1] - self.codec.residual, 0) // self.codec.block * self.codec.block
        if not ready:
            return replace(self, tail_HND=rows)
        whole = ready == rows.shape[1]
        new = self.codec.encode(rows if whole else rows[:, :ready].contiguous())
        _check_encoded(new, self.codec, rows.shape[0], ready)
        chunks = (*self.chunks[:1], self.chunks[1].cat(new)) if len(self.chunks) > 1 else (*self.chunks, new)
        view = self.view_HND
        if view is not None:
            fresh = view.new_empty(view.shape[0], new.n, view.shape[2])
            self.codec.decode(new, fresh)
            view = torch.cat((view, fresh), 1)
        tail = rows.new_empty(rows.shape[0], 0, rows.shape[2]) if whole else rows[:, ready:].clone()
        return Side(self.codec, chunks, tail, view)

    def read(self, dtype: torch.dtype) -> Tensor:
        """All rows [H, N, D] in `dtype`."""
        h, _, d = self.tail_HND.shape
        out = torch.empty(h, self.n, d, dtype=dtype, device=self.tail_HND.device)
        self.write_to(out)
        return out

    def write_to(self, out_HND: Tensor) -> None:
        """Decode all rows into out_HND, in its dtype."""
        at = 0
        if self.view_HND is not None:
            at = self.view_HND.shape[1]
            out_HND[:, :at] = self.view_HND
        else:
            for chunk in self.chunks:
                if self.codec.decode(chunk, out_HND[:, at : at + chunk.n]) is not None:  # type: ignore[func-returns-value]
                    raise TypeError(f"codec {self.codec.name}: decode must write into out_HND and return nothing")
                at += chunk.n
        if self.tail_HND.shape[1]:
            out_HND[:, at:] = self.tail_HND

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
            rows = RowIndex(index_HM[:, :-n_tail])
        view = None if self.view_HND is None else rows.of(self.view_HND)
        return Side(self.codec, (self.chunks[0].take(rows, *self.chunks[1:]),), self.tail_HND, view)

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


@dataclass(frozen=True)
class Part:
    """Rows of consecutive KV heads [start, stop) of one layer that hold the same number of rows.

    pos_HN: int32 original positions, None while the rows are contiguous up to the newest token (then nothing is stored).
    sums_HN: fp32 column sums, for scorers whose state lives on.
    """

    start: int
    stop: int
    keys: Side
    values: Side
    pos_HN: Tensor | None = None
    sums_HN: Tensor | None = None

    @property
    def n(self) -> int:
        return self.keys.n

    def append(self, new: KV, sums_HN: Tensor | None) -> Part:
        """Add the new rows of all heads of the layer; sums_HN [H, N + L] are this forward's attention sums, if recorded."""
        heads = slice(self.start, self.stop)
        pos, sums = self.pos_HN, self.sums_HN
        if pos is not None:
            pos = torch.cat((pos, new.pos_HN[heads]), 1)
        if sums is not None:
            assert sums_HN is not None
            sums = torch.nn.functional.pad(sums, (0, new.n)) + sums_HN
        keys, values = self.keys.append(new.k_HND[heads]), self.values.append(new.v_HND[heads])
        return Part(self.start, self.stop, keys, values, pos, sums)

    def positions(self, seen: int) -> Tensor:
        """int32 [H, N] original positions; the newest row stands at seen - 1."""
        if self.pos_HN is not None:
            return self.pos_HN
        device = self.keys.tail_HND.device
        contiguous = torch.arange(seen - self.n, seen, dtype=torch.int32, device=device)
        return contiguous.expand(self.stop - self.start, self.n)

    def take(self, index_HM: Tensor, seen: int) -> Part:
        """Copy the rows index_HM (int64 [H, M]) and their positions and sums."""
        rows = RowIndex(index_HM)
        pos = rows.of(self.positions(seen))
        sums = None if self.sums_HN is None else rows.of(self.sums_HN)
        return Part(self.start, self.stop, self.keys.take(index_HM, rows), self.values.take(index_HM, rows), pos, sums)

    def head(self, h: int) -> Part:
        """The part of one KV head (h counts from the part's first), as views: take() copies."""

        def view(side: Side) -> Side:
            chunks = tuple(
                Encoded(
                    {k: t[h : h + 1] for k, t in c.payload.items()},
                    {k: t[h : h + 1] for k, t in c.metadata.items()},
                    c.n,
                )
                for c in side.chunks
            )
            decoded = None if side.view_HND is None else side.view_HND[h : h + 1]
            return Side(side.codec, chunks, side.tail_HND[h : h + 1], decoded)

        pos, sums = (None if t is None else t[h : h + 1] for t in (self.pos_HN, self.sums_HN))
        start = self.start + h
        return Part(start, start + 1, view(self.keys), view(self.values), pos, sums)

    def newest(self, n: int) -> Part:
        """The last n rows of a contiguous part with exact codecs: what a sliding-window layer holds on to."""

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


LayerStore = tuple[Part, ...]
"""One layer of one batch row: one part when all heads hold the same number of rows, else one part a head."""
