"""A compression stack: which tokens stay, how keys and values are stored, and when this happens.

Stages compose: keep x key codec x value codec x phase. A combination that cannot work is refused here, with the reason and the
legal choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from harness.errors import UserError, require
from harness.fields import read_as
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.codec_rules import check_evicted, check_queries
from harness.stages.heads.uniform_heads import Uniform as UniformHeads
from harness.stages.keep import Keep
from harness.stages.layers.uniform_layers import Uniform as UniformLayers
from harness.stages.protocols import Needs

PHASES = ("prefill", "chunked", "always", "every_n")
POSITIONS = ("original", "cache")
ROPES = ("post", "pre")
READS = ("every_step", "cached")
EXACT: Codec = Exact()  # type: ignore[abstract]  # `check` has a body: nothing to refuse


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What is done to the cache. keep None: all tokens stay.

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

    keep: Keep | None = None
    keys: Codec = read_as(lambda stack, codec: _for_role(codec, "keys"), EXACT)
    values: Codec = read_as(lambda stack, codec: _for_role(codec, "values"), EXACT)
    phase: str = "prefill"
    positions: str = "original"
    rope: str = "post"
    read: str = "every_step"
    chunk: int = 256
    every: int = 1

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
        if self.phase == "prefill":
            return
        if not uniform:
            raise UserError(
                f"compress.phase={self.phase!r} with keep.heads={type(keep.heads).__name__} is not possible: budgets that "
                "differ by head are set only once; legal are phase=prefill or uniform heads"
            )
        for role, codec in (("keys", self.keys), ("values", self.values)):
            check_evicted(role, codec, self.phase, keep.sinks)

    @property
    def needs(self) -> Needs:
        """Statistics to record while the context is read."""
        return (self.keep.needs if self.keep else Needs()) | self.keys.needs

    @property
    def unrotated(self) -> bool:
        """Whether keys are stored without rotation, and rotated when they are read."""
        return self.positions == "cache" or self.rope == "pre"

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
        """Whether the scorer's column sums are stored with the cache after the context."""
        return self.evicts_steps and self.keep is not None and self.keep.scorer.keeps_state

    @property
    def encodes(self) -> bool:
        """Whether keys or values are stored by a codec other than Exact, lossless ones included."""
        return any(type(codec) is not Exact for codec in (self.keys, self.values))

    @property
    def compresses(self) -> bool:
        """False for the full cache only: all tokens, exact, at original positions, without a decoded copy.

        Only such a stack can use the exact prefill as it is.
        """
        return self.keep is not None or self.encodes or self.unrotated or self.read != "every_step"

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
        exact = max(_tail(codec, tokens + 1) for codec in (self.keys, self.values))
        if self.phase != "prefill" and exact > recent:
            raise UserError(
                f"compress.phase={self.phase!r} evicts from the {exact} exact newest tokens of the codec while only {recent} "
                f"are protected: legal are keep.recent >= {exact}, codec residual <= {recent}, a larger budget where the scale "
                "is frozen on the first tokens, or phase=prefill"
            )
        return tokens

    def describe(self) -> str:
        """A label made of the parts, for stacks that no YAML names: `keydiff, no recent, int4 keys, always`."""
        words = [] if self.keep is None else _rule(self.keep)
        codecs = {role: _codec(codec) for role, codec in (("keys", self.keys), ("values", self.values))}
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


def _rule(keep: Keep) -> list[str]:
    """The words of a label that say which tokens stay."""
    words = [_named(keep.scorer)]
    words += [f"{keep.sinks} sinks"] if keep.sinks else []
    words += [] if keep.recent is None else [f"{keep.recent or 'no'} recent"]
    splits = (("layers", keep.layers), ("heads", keep.heads))
    return words + [f"{_named(split)} {role}" for role, split in splits if type(split).__name__ != "Uniform"]


def _named(part: Any) -> str:
    """A part's class, and its settings that are not the defaults."""
    own = [one for one in fields(part) if one.init] if is_dataclass(part) else []
    shown = {one.name: getattr(part, one.name) for one in own if getattr(part, one.name) != one.default}
    settings = [f"{name} {value}" for name, value in shown.items() if isinstance(value, int | float | str | tuple)]
    return type(part).__name__.lower() + (f" ({', '.join(settings)})" if settings else "")


def _tail(codec: Codec, n: int) -> int:
    """Largest number of exact newest tokens while a store grows from n tokens by one flush."""
    return max(tokens - codec.leaving(tokens, 0) for tokens in range(n, n + codec.flush))


def _codec(codec: Codec) -> str:
    """Name of a codec, with settings that the name does not contain and that are not the default."""
    info = codec.info()
    shown = {
        key: info[key]
        for key in ("bits", "axis", "group", "residual", "sinks", "first", "seed", "outliers", "pruned", "scale")
        if info.get(key) is not None
    }
    if str(shown.get("bits", "")) in codec.name:
        shown.pop("bits", None)
    if shown.get("scale") == "dynamic":
        del shown["scale"]
    words = [*(f"{key} {value}" for key, value in shown.items()), *(["symmetric"] if info.get("symmetric") else [])]
    return codec.name + (f" ({', '.join(words)})" if words else "")
