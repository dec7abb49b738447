"""What a plan must know of a model: the shape of its cache, its parameters and its positions. No weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig

from harness.errors import UserError
from harness.files.paths import CONF
from harness.kv.shape import ModelShape
from harness.models.weights import positions, without_weights
from harness.planning.whole_shape import whole_shape

FOLDER = CONF / "dimensions"


@dataclass(frozen=True)
class Architecture:
    """A model's sizes.

    Attributes:
        shape: of its KV cache.
        parameters: numbers, each counted once (tied embeddings too).
        positions: tokens it was built for, None where its config names no number.
        source: where the dimensions are from.
    """

    name: str
    shape: ModelShape
    parameters: int
    positions: int | None
    source: str


def known() -> list[str]:
    """Models whose dimensions are in conf/dimensions."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def named(name: str, dtype: torch.dtype = torch.bfloat16) -> Architecture:
    """A model of conf/dimensions that computes in `dtype`; UserError where its cache is not supported."""
    found: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))  # type: ignore[assignment]
    config = built(found["config"])
    return Architecture(name, whole_shape(config, dtype), int(found["parameters"]), positions(config), str(found["source"]))


def built(dimensions: Mapping[str, Any]) -> Any:
    """The transformers config with these dimensions; UserError where the installed transformers has no such model type."""
    settings = dict(dimensions)
    kind = str(settings.pop("model_type"))
    try:
        return AutoConfig.for_model(kind, **settings)
    except ValueError:
        raise UserError(f"model type {kind!r} is not one of the installed transformers") from None


def of_config(name: str, config: Any, source: str, dtype: torch.dtype) -> Architecture:
    """A model by its transformers config, that computes in `dtype`."""
    return Architecture(name, whole_shape(config, dtype), count(config), positions(config), source)


def count(config: Any) -> int:
    """Parameters of the model that a config describes, laid out without memory."""
    model = without_weights(config, torch.float32, "eager")
    return sum(parameter.numel() for parameter in model.parameters())
