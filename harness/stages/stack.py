"""A compression stack: which tokens stay, how keys and values are stored, and when this happens.

Stages compose: share x keep x merge x key codec x value codec x phase. A combination that cannot work is refused here, with the
reason and the legal choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from harness.errors import UserError, require
from harness.fields import read_as
from harness.stages.codec.base import Codec
from harness.stages.codec.by_layer import codecs_of, of_layer
from harness.stages.codec.exact import Exact
from harness.stages.codec_rules import check_aligned, check_evicted, check_queries
from harness.stages.heads.uniform_heads import Uniform as UniformHeads
from harness.stages.keep import Keep
from harness.stages.layers.uniform_layers import Uniform as UniformLayers
from harness.stages.limits import Calibration
from harness.stages.merge import legal
from harness.stages.merge.parting import Merge, acts, needs_of
from harness.stages.part_words import codec_words, named, rule
from harness.stages.protocols import Needs
from harness.stages.share import share_rules
from harness.stages.share.sharing import Share

PHASES = ("prefill", "chunked", "always", "every_n")
POSITIONS = ("original", "cache")
ROPES = ("post", "pre")
READS = ("every_step", "cached")

EXACT: Codec = Exact()  # type: ignore[abstract]  # `check` has a body: nothing to refuse


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What is done to the cache. keep None: all tokens stay. merge None: tokens that go are dropped. share None: each layer and
    KV head has a store of its own.

    phase: when tokens are evicted. "prefill": once, after the context; "always": also after every forward, back to the same
        budget; "every_n": likewise, once `every` tokens were added; "chunked": while the context is read, after every `chunk`
        tokens, so that memory is bounded from the first token. Under prefill and chunked the answer's tokens all stay. Codecs
        encode new tokens in every phase.
    read: "every_step" decodes keys and values whenever they are read; "cached" keeps a decoded copy, counted as scratch bytes.
    positions: "original": a key keeps the RoPE rotation of its own position. "cache": keys are stored without rotation and
        rotated by their index in the cache when they are read, as in StreamingLLM; the next query's position is the number
        of tokens held.
    rope: "post": keys are stored after RoPE. "pre": before it, and rotated by their original position when they are read, so
        that codecs meet channels that no rotation has mixed (KVQuant). Positions "cache" store them so anyway.
    """

    share: Share | None = None
    keep: Keep | None = None
    keys: Codec = read_as(lambda stack, codec: _for_role(codec, "keys"), EXACT)
    values: Codec = read_as(lambda stack, codec: _for_role(codec, "values"), EXACT)
    phase: str = "prefill"
    positions: str = "original"
    rope: str = "post"
    read: str = "every_step"
    chunk: int = 256
    every: int = 1
    merge: Merge | None = None

    def __post_init__(self) -> None:
        require(self.phase in PHASES, "compress.phase", self.phase, f"allowed are {', '.join(PHASES)}")
        require(self.positions in POSITIONS, "compress.positions", self.positions, f"allowed are {', '.join(POSITIONS)}")
        require(self.rope in ROPES, "compress.rope", self.rope, f"allowed are {', '.join(ROPES)}")
        plain = self.rope == "post" or self.positions == "original"
        require(plain, "compress.rope", self.rope, "positions=cache stores keys before RoPE anyway; leave it at post")
        for name in ("chunk", "every"):
            number = getattr(self, name)
            ok = isinstance(number, int) and number > 0
            require(ok, f"compress.{name}", number, "a positive number of tokens")
        require(self.every == 1 or self.phase == "every_n", "compress.every", self.every, "it needs compress.phase=every_n")
        require(self.read in READS, "compress.read", self.read, f"allowed are {', '.join(READS)}")
        check_queries(self.keys, self.values, unrotated=self.unrotated, chunked=self.chunked)
        if self.keep is not None:
            self._check_pair(self.keep)
        own = {"keys": self.keys, "values": self.values}
        legal.check(self.merge, self.keep is not None, self.phase, self.positions, self.rope, **own)
        if self.share is not None:
            share_rules.check(self, self.share)

    def _check_pair(self, keep: Keep) -> None:
        scorer = type(keep.scorer).__name__
        allowed = ", ".join(keep.scorer.phases)
        require(self.phase in keep.scorer.phases, "compress.phase", self.phase, f"{scorer} runs in {allowed}")
        uniform = isinstance(keep.heads, UniformHeads)
        if self.positions == "cache" and not (uniform and isinstance(keep.layers, UniformLayers)):
            raise UserError(
                "compress.positions='cache' needs heads and layers that hold equally many tokens: a query has one position; "
                "legal are uniform keep.layers and keep.heads, or positions=original"
            )
        if self.positions == "cache" and keep.needs.query_moments:
            raise UserError(
                f"compress.positions='cache' with {scorer} is not possible: it predicts queries at original positions"
            )
        shared = getattr(keep.layers, "phases", PHASES)
        by = f"keep.layers={type(keep.layers).__name__} runs in {', '.join(shared)}"
        require(self.phase in shared, "compress.phase", self.phase, by)
        for role, codec in (("keys", self.keys), ("values", self.values)):
            check_aligned(role, codec, keep)
        if self.phase == "prefill":
            return
        if not uniform:
            raise UserError(
                f"compress.phase={self.phase!r} with keep.heads={type(keep.heads).__name__} is not possible: budgets that "
                "differ by head are set only once; legal are phase=prefill or uniform heads"
            )
        both = (("keys", self.keys), ("values", self.values))
        for role, codec in ((role, one) for role, found in both for one in codecs_of(found)):
            check_evicted(role, codec, self.phase, keep.sinks)

    @property
    def needs(self) -> Needs:
        """Statistics to record while the context is read."""
        return (self.keep.needs if self.keep else Needs()) | self.keys.needs | needs_of(self.merge)

    @property
    def unrotated(self) -> bool:
        """Whether keys are stored without rotation, and rotated when they are read."""
        return self.positions == "cache" or self.rope == "pre"

    @property
    def calibrations(self) -> list[Calibration]:
        """The texts on which its parts are measured before anything is stored."""
        found = [self.keys.calibration, self.values.calibration, self.share.calibration if self.share else None]
        return [wanted for wanted in found if wanted is not None]

    @property
    def evicts_steps(self) -> bool:
        """Whether tokens are evicted after the context too."""
        return self.keep is not None and self.phase in ("always", "every_n")

    @property
    def chunked(self) -> bool:
        """Whether the context is read in chunks, with evictions between them."""
        return self.keep is not None and self.phase == "chunked"

    @property
    def keeps_state(self) -> bool:
        """Whether column sums are stored with the cache after the context, for the scorer or the merge."""
        return self.evicts_steps and self.accumulates

    @property
    def accumulates(self) -> bool:
        """Whether column sums are carried on from one eviction to the next."""
        return (self.keep is not None and self.keep.scorer.keeps_state) or needs_of(self.merge).column_sums

    @property
    def merges(self) -> bool:
        """Whether tokens that go may change tokens that stay."""
        return acts(self.merge)

    @property
    def encodes(self) -> bool:
        """Whether keys or values are stored by a codec other than Exact, lossless ones included."""
        return any(type(codec) is not Exact for codec in (self.keys, self.values))

    @property
    def compresses(self) -> bool:
        """False for the full cache only: all tokens, exact, at original positions, without a decoded copy.

        Only such a stack can use the exact prefill as it is.
        """
        stages = self.share is not None or self.keep is not None or self.encodes
        return stages or self.unrotated or self.read != "every_step"

    def at(self, layer: int, layers: Sequence[int]) -> Stack:
        """The stack of one of the layers that it compresses, with that layer's own codecs; itself where all have the same."""
        keys, values = (of_layer(codec, layer, layers) for codec in (self.keys, self.values))
        if keys is self.keys and values is self.values:
            return self
        return self._at.setdefault((id(keys), id(values)), replace(self, keys=keys, values=values))

    @cached_property
    def _at(self) -> dict[tuple[int, int], Stack]:
        return {}

    def budget(self, context: int, nbytes: Callable[[int], int]) -> int | None:
        """Budget in tokens per layer and head for a context of `context` tokens; None without a keep.

        Raises UserError if it is smaller than sinks + recent, unless the whole context fits and nothing is evicted later.
        """
        if self.keep is None:
            return None
        tokens = self.keep.budget.tokens(context, nbytes)
        if tokens >= context and not self.evicts_steps:
            return tokens
        try:
            _, recent = self.keep.protected(tokens)
        except UserError as error:
            asked = self.keep.budget
            raise UserError(f"a budget of {asked.value:g} {asked.unit} is {tokens} tokens here: {error}") from None
        exact = max(_tail(one, tokens + 1) for codec in (self.keys, self.values) for one in codecs_of(codec))
        if self.phase != "prefill" and exact > recent:
            raise UserError(
                f"compress.phase={self.phase!r} evicts from the {exact} exact newest tokens of the codec while only {recent} "
                f"are protected: legal are keep.recent >= {exact}, codec residual <= {recent}, a larger budget where the scale "
                "is frozen on the first tokens, or phase=prefill"
            )
        return tokens

    def describe(self) -> str:
        """A label made of the parts, for stacks that no YAML names: `keydiff, no recent, int4 keys, always`."""
        words = [] if self.share is None else [self.share.words]
        words += [] if self.keep is None else rule(self.keep)
        words += [] if self.merge is None else [f"merged by {named(self.merge)}"]
        codecs = {role: codec_words(codec) for role, codec in (("keys", self.keys), ("values", self.values))}
        if self.encodes and codecs["keys"] == codecs["values"]:
            words.append(codecs["keys"])
        elif self.encodes:
            words += [f"{said} {role}" for role, said in codecs.items() if type(getattr(self, role)) is not Exact]
        if self.evicts_steps or self.chunked:
            words.append(
                {"every_n": f"every {self.every} tokens", "chunked": f"chunks of {self.chunk}"}.get(self.phase, self.phase)
            )
        words += ["cache positions"] if self.positions == "cache" else []
        words += ["keys before RoPE"] if self.rope == "pre" else []
        words += ["decoded copy"] if self.read == "cached" else []
        return ", ".join(words) or "full"


def unused(keep: object, phase: str) -> dict[str, Any]:
    """Settings that have no effect under this keep and phase, with their defaults (without a keep: all settings of time)."""
    names = ["phase"] if keep is None else []
    names += [name for name, needed in (("chunk", "chunked"), ("every", "every_n")) if keep is None or phase != needed]
    return {one.name: one.default for one in fields(Stack) if one.name in names}


def _for_role(codec: Codec, role: str) -> Codec:
    """The codec for "keys" or for "values"; one that does not inherit from Codec is the same for both."""
    return codec.for_role(role) if hasattr(codec, "for_role") else codec


def _tail(codec: Codec, n: int) -> int:
    """Largest number of exact newest tokens while a store grows from n tokens by one flush."""
    return max(tokens - codec.leaving(tokens, 0) for tokens in range(n, n + codec.flush))
