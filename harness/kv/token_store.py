"""Token stores: keys or values of a head group, as exact first tokens, encoded chunks and exact newest tokens.

Immutable: every method returns a new store that shares unchanged tensors, so copying a cache is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.errors import UserError
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec_rules import check_encoded
from harness.stages.encoded import Encoded, Heads, TokenIndex

ALL = slice(None)


@dataclass(frozen=True)
class TokenStore:
    """Keys or values of H heads, [H, N, D] when decoded: exact sinks, then encoded chunks (oldest first), then the exact tail.

    The first chunk is the compressed context and is not copied again; later tokens are collected in a second one.
    decoded_HND: decoded copy of the chunks in the dtype of attention, under read=cached.
    written: elements encoded so far. changed: whether any of them decodes to another number than it was.
    """

    codec: Codec
    chunks: tuple[Encoded, ...]
    tail_HND: Tensor
    decoded_HND: Tensor | None = None
    written: int = 0
    first_HND: Tensor | None = None  # None if the codec has no sinks
    changed: bool = False

    @classmethod
    def of(cls, x_HND: Tensor, codec: Codec, view_dtype: torch.dtype | None, heads: Heads | None = None) -> TokenStore:
        """Store x: tokens that the codec does not keep exact are encoded.

        view_dtype: of a decoded copy, None without one. heads: the heads of x, for the codec's constants.
        """
        empty = x_HND.new_empty(x_HND.shape[0], 0, x_HND.shape[2])
        decoded = None if view_dtype is None else empty.to(view_dtype)
        return cls(codec, (), empty, decoded, 0, empty if codec.sinks else None).append(x_HND, heads)

    @property
    def n_first(self) -> int:
        """Exact first tokens."""
        return 0 if self.first_HND is None else int(self.first_HND.shape[1])

    @cached_property
    def n_encoded(self) -> int:
        """Encoded tokens."""
        return sum(chunk.n for chunk in self.chunks)

    @cached_property
    def n(self) -> int:
        """Tokens per head."""
        return self.n_first + self.n_encoded + int(self.tail_HND.shape[1])

    @property
    def plain(self) -> bool:
        """Whether the chunks hold all tokens as they are."""
        return type(self.codec) is Exact

    @property
    def clipped(self) -> int:
        """Encoded elements that were outside the code range."""
        return int(sum(chunk.clipped for chunk in self.chunks))

    def append(self, x_HND: Tensor, heads: Heads | None = None) -> TokenStore:
        """Add tokens to the tail, and encode the oldest of it once the codec says so: the same however calls are chunked."""
        if type(self) is TokenStore and type(self.codec) is Exact and self.decoded_HND is None:  # nothing waits or is computed
            chunks, written = self._followed_by(self.codec.encode(x_HND)), self.written + x_HND.numel()
            return TokenStore(self.codec, chunks, self.tail_HND, None, written, self.first_HND, self.changed)
        if self.first_HND is not None and (missing := self.codec.sinks - self.n_first):
            begun = replace(self, first_HND=torch.cat((self.first_HND, x_HND[:, :missing]), 1))
            rest = x_HND[:, missing:].clone()
            return TokenStore.append(begun, rest, heads) if rest.shape[1] else begun
        tail = torch.cat((self.tail_HND, x_HND), 1) if self.tail_HND.shape[1] else x_HND
        ready = self.codec.leaving(tail.shape[1], self.n_encoded)
        if not ready:
            return replace(self, tail_HND=tail)
        whole = ready == tail.shape[1]
        old = tail if whole else tail[:, :ready].clone(memory_format=torch.contiguous_format)
        heads = heads or Heads((0,), 0, len(old))
        codec, new = self._encode(old, heads)
        decoded = self.decoded_HND
        if decoded is not None:
            fresh = decoded.new_empty(decoded.shape[0], new.n, decoded.shape[2])
            codec.decode(new, fresh)
            decoded = torch.cat((decoded, fresh), 1)
        rest = tail.new_empty(tail.shape[0], 0, tail.shape[2]) if whole else tail[:, ready:].clone()
        changed, written = self.changed or _changes(codec, new, old, heads), self.written + old.numel()
        chunks = self._followed_by(new)
        return replace(self, codec=codec, chunks=chunks, tail_HND=rest, decoded_HND=decoded, written=written, changed=changed)

    def _followed_by(self, new: Encoded) -> tuple[Encoded, ...]:
        """The chunks with newer tokens."""
        return (self.chunks[0], self.chunks[1].cat(new)) if len(self.chunks) > 1 else (*self.chunks, new)

    def _encode(self, x_HND: Tensor, heads: Heads) -> tuple[Codec, Encoded]:
        """(codec, fitted if these are its first tokens; the encoded tokens).

        The codec gets a copy, as x may belong to the exact prefill that other stacks read.
        """
        codec, given = self.codec, x_HND if type(self.codec) is Exact else x_HND.clone()
        codec = codec if self.chunks else codec.fit(given, heads)
        new = codec.encode(given)
        check_encoded(new, codec, heads, x_HND.shape[1])
        return codec, new

    def read(self, dtype: torch.dtype, heads: slice = ALL) -> Tensor:
        """All tokens of these heads, decoded, [H, N, D] in `dtype`."""
        tail = self.tail_HND[heads]
        out = torch.empty(tail.shape[0], self.n, tail.shape[2], dtype=dtype, device=tail.device)
        self.write_to(out, heads)
        return out

    def write_to(self, out_HND: Tensor, heads: slice = ALL) -> None:
        """Decode all tokens of these heads into out_HND, in its dtype."""
        at = self.n_first
        if self.first_HND is not None:
            out_HND[:, :at] = self.first_HND[heads]
        if self.decoded_HND is not None and self.decoded_HND.dtype == out_HND.dtype:  # else it would be rounded twice
            out_HND[:, at : at + self.decoded_HND.shape[1]] = self.decoded_HND[heads]
            at += self.decoded_HND.shape[1]
        else:
            for chunk in self.chunks:
                found = chunk if heads == ALL else chunk.heads(heads.start, heads.stop)
                if self.codec.decode(found, out_HND[:, at : at + chunk.n]) is not None:  # type: ignore[func-returns-value]
                    raise TypeError(f"codec {self.codec.name}: decode must write into out_HND and return nothing")
                at += chunk.n
        if self.tail_HND.shape[1]:
            out_HND[:, at:] = self.tail_HND[heads]

    def newest_encoded(self, n: int, dtype: torch.dtype) -> Tensor:
        """The last n encoded tokens [H, n, D] (all in the newest chunk), decoded to `dtype`."""
        chunk, tail = self.chunks[-1], self.tail_HND
        out = torch.empty(tail.shape[0], n, tail.shape[2], dtype=dtype, device=tail.device)
        self.codec.decode(chunk if n == chunk.n else chunk.newest(n), out)
        return out

    def exact(self) -> Tensor:
        """Tokens of a store with codec Exact, [H, N, D] in the cache dtype; not a copy if there is one chunk."""
        assert not self.codec.lossy and not self.tail_HND.shape[1]
        chunks = [chunk.payload["tokens"] for chunk in self.chunks]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)

    def take(self, index_HM: Tensor, chosen: TokenIndex) -> TokenStore:
        """Copy the tokens index_HM; UserError if exact first or newest tokens are not all among them.

        chosen: the same index, with the heads it is for.
        """
        n_tail, n_first, m = int(self.tail_HND.shape[1]), self.n_first, index_HM.shape[1]
        if n_tail or n_first:
            if chosen.first < n_first or chosen.newest < n_tail:
                self._check_exact(index_HM, n_first, n_tail)
            chosen = TokenIndex(index_HM[:, n_first : m - n_tail] - n_first, chosen.heads, newest=chosen.newest - n_tail)
        decoded = None if self.decoded_HND is None else chosen.of(self.decoded_HND)
        codec = self.codec if chosen.heads is None else self.codec.of_heads(chosen.heads)
        chunks = (_one_copy(self.chunks[0].take(chosen, *self.chunks[1:]), codec),) if self.chunks else ()
        first = None if self.first_HND is None else chosen.of_heads(self.first_HND)
        return TokenStore(codec, chunks, chosen.of_heads(self.tail_HND), decoded, self.written, first, self.changed)

    def owned(self) -> TokenStore:
        """The same in storages of their own size: a view would keep all of a larger storage alive."""
        first, decoded = (None if x is None else own(x) for x in (self.first_HND, self.decoded_HND))
        chunks = tuple(chunk.map(own) for chunk in self.chunks)
        return replace(self, chunks=chunks, tail_HND=own(self.tail_HND), first_HND=first, decoded_HND=decoded)

    def _check_exact(self, index_HM: Tensor, n_first: int, n_tail: int) -> None:
        kept, device = index_HM.shape[1], index_HM.device
        enough = kept >= n_first + n_tail
        if not enough or not bool((index_HM[:, kept - n_tail :] == torch.arange(self.n - n_tail, self.n, device=device)).all()):
            raise UserError(
                f"keep would evict from the {n_tail} exact newest tokens of codec {self.codec.name}: raise keep.recent or the "
                "budget of the smallest layer, or lower the codec's residual"
            )
        if not bool((index_HM[:, :n_first] == torch.arange(n_first, device=device)).all()):
            raise UserError(
                f"keep would evict from the {n_first} exact first tokens of codec {self.codec.name}: raise keep.sinks"
            )

    def encoded_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(byte kind, tensor) of the encoded tokens, and of constants of the chunks or the codec."""
        shared: dict[int, Tensor] = {}
        for chunk in self.chunks:
            for t in chunk.payload.values():
                yield "payload", t
            for t in chunk.metadata.values():
                yield "metadata", t
            for t in chunk.shared.values():
                shared[id(t)] = t
        if self.chunks and not self.plain:
            shared |= {id(t): t for t in constants(self.codec).values()}
        for t in shared.values():
            yield "metadata", t

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(byte kind, tensor) of all tensors."""
        yield from self.encoded_tensors()
        yield "tail" if self.codec.lossy else "payload", self.tail_HND
        if self.first_HND is not None:
            yield "tail", self.first_HND
        if self.decoded_HND is not None:
            yield "scratch", self.decoded_HND


def own(x: Tensor) -> Tensor:
    """A copy of x in a storage of its own size; x itself if it has one."""
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


def constants(codec: Codec) -> dict[str, Tensor]:
    """Tensor attributes of a fitted codec by name, including those of a codec inside it."""
    found: dict[str, Tensor] = {}
    for name, value in getattr(codec, "__dict__", {}).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif hasattr(value, "encode"):
            found |= {f"{name}.{inner}": tensor for inner, tensor in constants(value).items()}
    return found


def _one_copy(chunk: Encoded, codec: Codec) -> Encoded:
    """The chunk with its shared constants replaced by the codec's equal tensors, so that they are stored once."""
    held = {id(h): h for h in constants(codec).values()}
    new = [(name, t) for name, t in chunk.shared.items() if id(t) not in held]  # a comparison makes the host wait
    same = {name: h for name, t in new for h in held.values() if h.dtype == t.dtype and torch.equal(h, t)}
    return replace(chunk, shared={**chunk.shared, **same})


def _changes(codec: Codec, new: Encoded, exact_HND: Tensor, heads: Heads) -> bool:
    """Whether any number decodes to another one; checked head by head (or layer), to bound memory, until one does."""
    if type(codec) is Exact:
        return False
    step = heads.each if getattr(codec, "joint", False) else 1
    for h in range(0, len(exact_HND), step):
        exact = exact_HND[h : h + step].float()
        out = torch.empty_like(exact)
        codec.decode(new.heads(h, h + step), out)
        if not torch.equal(out, exact):
            return True
    return False
