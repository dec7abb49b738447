"""The words of a label made of a stack's parts, for stacks that no YAML names."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from harness.stages.codec.base import Codec
from harness.stages.keep import Keep

SETTINGS = (  # of a codec, as a label shows them
    *("bits", "rank", "heads", "layers", "basis", "axis", "group", "residual", "sinks", "first", "seed", "outliers", "pruned"),
    "scale",
)


def rule(keep: Keep) -> list[str]:
    """The words of a label that say which tokens stay."""
    words = [named(keep.scorer)]
    words += [f"{keep.sinks} sinks"] if keep.sinks else []
    words += [] if keep.recent is None else [f"{keep.recent or 'no'} recent"]
    splits = (("layers", keep.layers), ("heads", keep.heads))
    return words + [f"{named(split)} {role}" for role, split in splits if type(split).__name__ != "Uniform"]


def named(part: Any) -> str:
    """A part's class, and its settings that are not the defaults."""
    own = [one for one in fields(part) if one.init] if is_dataclass(part) else []
    shown = {one.name: getattr(part, one.name) for one in own if getattr(part, one.name) != one.default}
    settings = [f"{name} {value}" for name, value in shown.items() if isinstance(value, int | float | str | tuple)]
    return type(part).__name__.lower() + (f" ({', '.join(settings)})" if settings else "")


def codec_words(codec: Codec) -> str:
    """Name of a codec, with settings that the name does not contain and that are not the default."""
    info = codec.info()
    shown = {key: info[key] for key in SETTINGS if info.get(key) is not None}
    if str(shown.get("bits", "")) in codec.name:
        shown.pop("bits", None)
    if shown.get("scale") == "dynamic":
        del shown["scale"]
    words = [*(f"{key} {value}" for key, value in shown.items()), *(["symmetric"] if info.get("symmetric") else [])]
    return codec.name + (f" ({', '.join(words)})" if words else "")
