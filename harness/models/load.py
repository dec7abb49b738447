"""From a model spec to a loaded model: weights, tokenizer, cache dtype, end tokens and an identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from harness.errors import require
from harness.fields import read_as
from harness.files.paths import user_path
from harness.models import sources
from harness.models.decoding import decoding
from harness.models.placement import check_map, kind_of_device, usable_device
from harness.models.random_model import RandomModel
from harness.models.sources import Wheel
from harness.models.tokenizer import Tokenizer
from harness.models.weights import end_ids, load_weights, positions, read_config, without_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NEEDED = {"wheel": "wheel", "path": "path", "gguf": "path", "hub": "repo", "random": "random"}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model, and in which dtypes and where it runs. Hashable: `load` is cached by it.

    Attributes:
        name: label in run ids and plots; by default the last part of the path or repository.
        source: wheel | path | gguf | hub | random.
        path, repo, revision, wheel, random: the settings of that source; revision None is the main branch.
        dtype: dtype of weights and computation, float32 | bfloat16 | float16.
        kv_dtype: dtype of the cache; keys and values are rounded to it once.
        device: auto (a CUDA device where there is one) | cpu | cuda[:N] | mps.
        device_map: how to spread the model over several devices, auto | balanced | balanced_low_0 | sequential, or one device;
            `device` is then left at auto.
        tokenizer: model (refused below 3.5 characters a token of English) | bytes (one token a byte is fine).
    """

    name: str = read_as(lambda spec, given: given or spec.label(), "")
    source: str
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    wheel: Wheel | None = None
    random: RandomModel | None = None
    dtype: str = "float32"
    kv_dtype: str = "bfloat16"
    device: str = "auto"
    device_map: str | None = None
    tokenizer: str = "model"

    def __post_init__(self) -> None:
        require(self.source in _NEEDED, "model.source", self.source, "one of " + ", ".join(_NEEDED))
        needed = _NEEDED[self.source]
        require(bool(getattr(self, needed)), f"model.{needed}", getattr(self, needed), f"source {self.source} needs it")
        for key in ("dtype", "kv_dtype"):
            value = getattr(self, key)
            require(value in DTYPES, f"model.{key}", value, "one of " + ", ".join(DTYPES))
        require(self.tokenizer in ("model", "bytes"), "model.tokenizer", self.tokenizer, "one of model, bytes")

    def label(self) -> str:
        """The name of a model that was given none: the last part of the path, repository or package.

        For a path such as `.` it is the folder's own name.
        """
        if self.path:
            folder = user_path(self.path)
            name = folder.stem if self.source == "gguf" else folder.name
            return (name if name not in ("", "..") else folder.resolve().name) or self.source
        return Path(self.repo or (self.wheel.package if self.wheel else "")).name or self.source

    def check(self) -> None:
        """UserError for what can be checked without fetching or loading: directory, device, placement."""
        if self.source == "path":
            sources.local_directory(str(self.path))
        if self.source == "gguf":
            sources.gguf_file(str(self.path))
        usable_device(self.device)
        if self.device_map is not None:
            check_map(self.device_map, self.device)

    def directory(self, *, weights: bool = True) -> Path:
        """The local transformers directory, fetched and converted if needed; `weights=False` leaves weights on the hub."""
        if self.source == "wheel" and self.wheel:
            return self.wheel.directory()
        if self.source == "random" and self.random:
            return sources.random_directory(self.random)
        if self.source == "gguf":
            return sources.gguf_directory(str(self.path))
        if self.source == "hub":
            return sources.hub_directory(str(self.repo), self.revision, weights=weights)
        return sources.local_directory(str(self.path))

    def config(self) -> Any:
        """The model's transformers config, without loading weights; UserError if it cannot be read."""
        return read_config(self.directory(weights=False))

    @property
    def max_length(self) -> int | None:
        """Positions the model was built for, read from its config."""
        return positions(self.config())

    def identity(self) -> dict[str, str]:
        """Source, commit or digest, dtypes, and the kind of device if it is no CPU, which fix its numbers; loads no weights."""
        return dict(_identity(self))


@dataclass(frozen=True, kw_only=True)
class LM:
    """A loaded model.

    Attributes:
        model: transformers model, evaluation mode, no gradients.
        tokens: its tokenizer.
        kv_dtype: dtype of stored K and V.
        eos_ids: ids that end an answer, from generation config, config and tokenizer.
        identity: `ModelSpec.identity()`.
        decoding: for records: how answers are chosen, and which of the model's generation settings are ignored.
    """

    model: Any
    tokens: Tokenizer
    kv_dtype: torch.dtype
    eos_ids: tuple[int, ...]
    identity: Mapping[str, str]
    decoding: str = "greedy"


@lru_cache(maxsize=1)  # one: a sweep over models must not keep two sets of weights
def load(spec: ModelSpec, attn: str = "sdpa") -> LM:
    """Fetch, convert and load a model; cached for the same arguments.

    Args:
        spec: the model.
        attn: name of a registered transformers attention.

    Raises:
        UserError: files cannot be fetched or read, or the device is missing.
    """
    spec.check()
    directory = spec.directory()
    if spec.source in ("wheel", "gguf", "random"):  # they load in a second: no progress bar
        transformers_logging.disable_progress_bar()
    tokens = _tokenizer(spec, directory, read_config(directory))
    return _lm(spec, tokens, load_weights(directory, DTYPES[spec.dtype], attn, spec.device, spec.device_map))


def outline(spec: ModelSpec, attn: str = "sdpa") -> LM:
    """As `load`, but without weights: tokenizer, config and identity are the same, tensors are on the meta device.

    Needs neither the device nor the memory of the model, and only its small files. End tokens may lack those of a generation
    config. UserError as in `load`.
    """
    directory = spec.directory(weights=False)
    config = read_config(directory)
    tokens = _tokenizer(spec, directory, config)
    return _lm(spec, tokens, without_weights(config, DTYPES[spec.dtype], attn, f" in {directory}"))


def _tokenizer(spec: ModelSpec, directory: Path, config: Any) -> Tokenizer:
    return Tokenizer.load(directory, max_length=positions(config), bytewise=spec.tokenizer == "bytes")


def _lm(spec: ModelSpec, tokens: Tokenizer, model: Any) -> LM:
    return LM(
        model=model.eval().requires_grad_(False),
        tokens=tokens,
        kv_dtype=DTYPES[spec.kv_dtype],
        eos_ids=end_ids(model, tokens.eos_ids),
        identity=spec.identity(),
        decoding=decoding(model.generation_config.to_diff_dict()),
    )


@lru_cache
def _identity(spec: ModelSpec) -> Mapping[str, str]:
    found = {"source": spec.source}
    if spec.source == "wheel" and spec.wheel:
        found |= spec.wheel.identity()
    elif spec.source == "random" and spec.random:
        found |= sources.random_identity(spec.random)
    elif spec.source == "hub":
        found |= {"repo": str(spec.repo), "revision": spec.directory(weights=False).name}
    elif spec.source == "gguf":
        found |= sources.gguf_identity(str(spec.path))
    else:
        found |= sources.local_identity(str(spec.path))
    kind = kind_of_device(spec.device, spec.device_map)
    return found | {"dtype": spec.dtype, "kv_dtype": spec.kv_dtype} | ({} if kind == "cpu" else {"device": kind})
