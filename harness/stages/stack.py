"""One compression stack as a frozen value: which rows stay, how they are stored, when. It knows no model and no cache.

Stages compose: keep (rows) x key codec x value codec x phase. An illegal pair is refused here, with the reason and what
would be legal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from harness.errors import UserError, require
from harness.stages.codec.base import Codec
from harness.stages.codec.exact import Exact
from harness.stages.heads.uniform_heads import Uniform as UniformHeads
from harness.stages.keep import Keep
from harness.stages.layers.uniform_layers import Uniform as UniformLayers
from harness.stages.protocols import Needs

PHASES = ("prefill", "chunked", "always", "every_n")
POSITIONS = ("original", "cache")
READS = ("every_step", "cached")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What happens to the cache.

    phase: "prefill" compresses the context once and lets the answer's rows join the store. "always" also evicts after every
        forward, back to the same budget, "every_n" when `every` tokens have joined since. "chunked" reads the context in
        chunks of `chunk` tokens and evicts after each: memory is bounded from the first token; the answer's rows join the
        store. Codecs encode new rows in all of them.
    read: "every_step" decodes the store whenever it is read; "cached" keeps a decoded copy, counted as scratch bytes.
    positions: "original": a row keeps the rotation of the position it was seen at. "cache": keys are stored without rotation
        and turned to their place in the cache whenever they are read, as StreamingLLM does; the newest query stands at the end.
    """

    keep: Keep | None = None
    keys: Codec = field(default_factory=Exact)
    values: Codec = field(default_factory=Exact)
    phase: str = "prefill"
    positions: str = "original"
    read: str = "every_step"
    chunk: int = 256
    every: int = 1

    def __post_init__(self) -> None:
        for role in ("keys", "values"):
            codec: Any = getattr(self, role)
            object.__setattr__(self, role, codec.for_role(role) if hasattr(codec, "for_role") else codec)
        require(self.phase in PHASES, "compress.phase", self.phase, f"allowed are {', '.join(PHASES)}")
        require(self.positions in POSITIONS, "compress.positions", self.positions, f"allowed are {', '.join(POSITIONS)}")
        for name in ("chunk", "every"):
            number = getattr(self, name)
            ok = isinstance(number, int) and number > 0
            require(ok, f"compress.{name}", number, "a positive number of tokens")
        require(self.every == 1 or self.phase == "every_n", "compress.every", self.every, "it needs compress.phase=every_n")
        require(self.read in READS, "compress.read", self.read, f"allowed are {', '.join(READS)}")
        if self.keep is not None:
            self._check_pair(self.keep)

    def _check_pair(self, keep: Keep) -> None:
        scorer = type(keep.scorer).__name__
        allowed = ", ".join(keep.scorer.phases)
        require(self.phase in keep.scorer.phases, "compress.phase", self.phase, f"{scorer} runs in {allowed}")
        uniform = isinstance(keep.heads, UniformHeads)
        if self.positions == "cache" and not (uniform and isinstance(keep.layers, UniformLayers)):
            raise UserError(
                "compress.positions='cache' needs heads and layers that hold as many rows: a query has one place in the cache; "
                "legal are uniform keep.layers and keep.heads, or positions=original"
            )
        if self.positions == "cache" and self.needs.query_moments:
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
                f"compress.phase={self.phase!r} with keep.heads={type(keep.heads).__name__} is not possible: heads that hold "
                "different numbers of rows are chosen once; legal are phase=prefill or uniform heads"
            )
        for role, codec in (("keys", self.keys), ("values", self.values)):
            if codec.sinks > keep.sinks:
                raise UserError(
                    f"compress.phase={self.phase!r} with compress.{role}.sinks={codec.sinks} is not possible: keep.sinks="
                    f"{keep.sinks} would let exact first rows go; legal are keep.sinks >= {codec.sinks} or phase=prefill"
                )
            if codec.block > 1:
                raise UserError(
                    f"compress.phase={self.phase!r} with compress.{role}={codec.name} is not possible: it would evict single "
                    f"rows from blocks of {codec.block} rows that share a scale; legal are phase=prefill (evict, then encode), "
                    f"a scale per token ({role}.axis=token where the codec has it, int8, hadamard_int4), or one that never "
                    "changes (int8_static, fp8_e4m3)"
                )

    @property
    def needs(self) -> Needs:
        """Statistics to record while the context is read."""
        return self.keep.needs if self.keep else Needs()

    @property
    def evicts_steps(self) -> bool:
        """Whether rows are evicted after the context too."""
        return self.keep is not None and self.phase in ("always", "every_n")

    @property
    def chunked(self) -> bool:
        """Whether the context is read in chunks, with evictions between them."""
        return self.keep is not None and self.phase == "chunked"

    @property
    def keeps_state(self) -> bool:
        """Whether column sums live on in the store after the context."""
        return self.evicts_steps and self.keep is not None and self.keep.scorer.keeps_state

    @property
    def encodes(self) -> bool:
        """Whether rows are stored by a codec of any kind; one that loses nothing is one too."""
        return any(type(codec) is not Exact for codec in (self.keys, self.values))

    @property
    def compresses(self) -> bool:
        """False for the full cache alone: all rows, as they came, at their own positions, and no copy beside them.

        Only that one may share an exact prefix as it is; everything else has something done to its rows.
        """
        return self.keep is not None or self.encodes or self.positions != "original" or self.read != "every_step"

    def budget(self, context: int, nbytes: Callable[[int], int]) -> int | None:
        """Rows per layer and head for this context, or None when all stay; UserError when too small for this example.

        A budget that holds the whole context is not too small for what it protects, unless rows are evicted later on.
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
            raise UserError(f"a budget of {asked.value:g} {asked.unit} is {tokens} rows here: {error}") from None
        exact = max(_tail(codec, tokens + 1) for codec in (self.keys, self.values))
        if self.phase != "prefill" and exact > recent:
            raise UserError(
                f"compress.phase={self.phase!r} evicts from the {exact} exact newest rows of the codec while only {recent} "
                f"are protected: legal are keep.recent >= {exact}, codec residual <= {recent}, a larger budget where the scale "
                "is frozen on the first rows, or phase=prefill"
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
        words += ["decoded copy"] if self.read == "cached" else []
        return ", ".join(words) or "full"


def unused(keep: object, phase: str) -> dict[str, Any]:
    """Settings of a stack that change nothing, with their defaults: without evictions all that is about when they happen."""
    names = ["phase"] if keep is None else []
    names += [name for name, needed in (("chunk", "chunked"), ("every", "every_n")) if keep is None or phase != needed]
    return {one.name: one.default for one in fields(Stack) if one.name in names}


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
    """The most exact rows in a store of n rows or a few more."""
    return max(rows - codec.leaving(rows, 0) for rows in range(n, n + codec.flush))


def _codec(codec: Codec) -> str:
    """Name and the settings that codecs of one name may differ in, what the name or the default already says left out."""
    info = codec.info()
    shown = {
        key: info[key] for key in ("bits", "axis", "group", "residual", "sinks", "first", "scale") if info.get(key) is not None
    }
    if str(shown.get("bits", "")) in codec.name:
        shown.pop("bits", None)
    if shown.get("scale") == "dynamic":
        del shown["scale"]
    words = [*(f"{key} {value}" for key, value in shown.items()), *(["symmetric"] if info.get("symmetric") else [])]
    return codec.name + (f" ({', '.join(words)})" if words else "")
