"""Every member of conf/{compress,keep,codec}, found through the YAML tree: a new one is tried by the tests on arrival.

Members are frozen: whoever asks for one twice gets the same object, made once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from harness.stages.bases import Bases
from harness.stages.codec.base import Codec
from harness.stages.codec.xkv import XKV
from harness.stages.encoded import Heads
from harness.stages.keep import Keep
from harness.stages.limits import Codebooks
from harness.stages.protocols import Needs
from harness.stages.share.sharing import Measured, Mixed
from harness.stages.stack import Stack

CONF = Path(__file__).parents[2] / "conf"


@dataclass(frozen=True)
class Flat(Codebooks):
    """One limit for every channel of any model: a calibration table for models that were never calibrated.

    Its codebooks of `size` points are even, and have a zero.
    """

    by_layer: dict[int, torch.Tensor] = field(default_factory=dict)
    limit: float = 8.0
    size: int = 0

    def of(self, heads: Heads, d: int) -> torch.Tensor:
        return torch.full((heads.n, d), self.limit)

    def range(self, heads: Heads, d: int) -> tuple[torch.Tensor, torch.Tensor]:
        return -self.of(heads, d), self.of(heads, d)

    def points_of(self, heads: Heads) -> torch.Tensor:
        return (torch.arange(self.size) / (self.size // 2) - 1).expand(len(heads.layers), -1).clone()


class FlatMeasured(Measured):
    """For models that were never calibrated: neighbours are the most similar layers, heads need no turning or mixing."""

    def basis(self, name: str, heads: int, d: int) -> torch.Tensor:
        return torch.eye(d).repeat(heads, 1, 1)

    def mixed(self, layer: int, heads: int, d_key: int, d_value: int) -> Mixed:
        size = heads * (d_key + d_value)
        vectors = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(size))).Q
        return Mixed(torch.eye(heads).repeat(d_key, 1, 1), vectors, torch.ones(()))

    def similarity(self, one: int, other: int) -> float:
        return -abs(one - other)


FLAT = FlatMeasured({}, {})


def members(group: str) -> list[str]:
    """Names in a group, sorted."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def everything() -> Needs:
    """What all members of conf/keep and conf/codec together ask to be recorded."""
    needs = Needs()
    for name in members("keep"):
        needs |= keep(name, 100).needs
    for name in members("codec"):
        needs |= member("codec", name).needs
    return needs


@cache
def _few(group: str, number: int) -> DictConfig:
    """Eight members of a group, composed at once: Hydra then reads what they share but once."""
    names = members(group)[8 * number :][:8]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        found: DictConfig = hydra.compose(overrides=[f"+{group}@members.{name}={name}" for name in names]).members
    return found


def composed(group: str, name: str) -> DictConfig:
    """A member as Hydra composes it, its defaults list included."""
    found: DictConfig = _few(group, members(group).index(name) // 8)[name]
    return found


def config(group: str, name: str, *changes: str) -> dict[str, Any]:
    """Resolved configuration of a member; `changes` are relative to it, such as budget.value=8."""
    changed = OmegaConf.merge(composed(group, name), OmegaConf.from_dotlist(list(changes)))
    found: dict[str, Any] = OmegaConf.to_container(changed, resolve=True)  # type: ignore[assignment]
    return {k: v for k, v in found.items() if k not in ("name", "points")} if group == "compress" else found


@cache
def member(group: str, name: str, *changes: str) -> Any:
    """A member of keep or codec, instantiated; a codec that asks for calibration gets the flat table."""
    found = instantiate(config(group, name, *changes), _convert_="all")
    return _calibrated(found) if group == "codec" else found


@dataclass(frozen=True)
class Turned(Bases):
    """An orthonormal basis, of no meaning, for the heads of any model."""

    by_layer: dict[int, torch.Tensor] = field(default_factory=dict)

    def of_heads(self, heads: Heads, s: int, d: int, rank: int) -> torch.Tensor:
        random = torch.randn(s * d, s * d, generator=torch.Generator().manual_seed(s * d))
        return torch.linalg.qr(random).Q[:, :rank].expand(heads.n // s, -1, -1).reshape(heads.n, d, rank)


def _calibrated(codec: Codec) -> Codec:
    if isinstance(codec, XKV):
        return replace(codec, layers=1)  # tiny models have as many layers as they like
    if codec.span is not None:
        return codec.calibrated(Turned())
    return codec if codec.calibration is None else codec.calibrated(Flat(size=codec.fitting.size if codec.fitting else 0))


def split(group: str, name: str) -> Any:
    """A member of layers or heads, instantiated as part of a keep."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        found = hydra.compose(overrides=["+keep@it=knorm", f"{group}@it.{group}={name}"]).it
        return instantiate(OmegaConf.to_container(found, resolve=True)[group], _convert_="all")


@cache
def stack(name: str, *changes: str) -> Stack:
    """A member of compress, instantiated, as `member` does."""
    found = member("compress", name, *changes)
    assert isinstance(found, Stack)
    share = found.share if found.share is None or found.share.calibration is None else found.share.fitted(FLAT)
    return replace(found, share=share, keys=_calibrated(found.keys), values=_calibrated(found.values))


def keep(name: str, tokens: int, **changes: Any) -> Keep:
    """A member of keep under a budget of tokens; changes replace its fields, such as layers and heads."""
    found: Keep = replace(_keep(name, tokens), **changes)
    return found


@cache
def _keep(name: str, tokens: int) -> Keep:
    parts = config("keep", name)
    found: Keep = instantiate(parts | {"budget": parts["budget"] | {"unit": "tokens", "value": tokens}}, _convert_="all")
    return found
