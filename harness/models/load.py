"""One model ready to run: weights, tokenizer, cache dtype, end tokens and an identity, from a frozen spec.

It does not know where files come from (`sources`), nor anything about compression: the attention is a name it is given.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError  # what torch says of weights that hold more than tensors
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from harness.errors import UserError, require
from harness.files.paths import user_path
from harness.models import sources
from harness.models.decoding import decoding
from harness.models.random_model import RandomModel
from harness.models.sources import Wheel
from harness.models.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NEEDED = {"wheel": "wheel", "path": "path", "hub": "repo", "random": "random"}
_CANNOT_LOAD = (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, SafetensorError, UnpicklingError)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model, and how it is held. Hashable: one process loads one spec once.

    Attributes:
        name: label in run ids and plots; by default the last part of the path or repository.
        source: wheel | path | hub | random.
        path, repo, revision, wheel, random: what that source needs; revision None is the main branch.
        dtype: of weights and computation, float32 | bfloat16 | float16.
        kv_dtype: K and V are rounded to it once, on entry to the cache.
        device: auto (a CUDA device where there is one) | cpu | cuda[:N] | mps.
        device_map: transformers' own placement over several devices, for example auto; then `device` is not read.
        tokenizer: model (must give more than 3.5 characters a token on English) | bytes.
    """

    name: str = ""
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
            require(value in _DTYPES, f"model.{key}", value, "one of " + ", ".join(_DTYPES))
        require(self.tokenizer in ("model", "bytes"), "model.tokenizer", self.tokenizer, "one of model, bytes")
        if not self.name:
            object.__setattr__(self, "name", self._label())

    def _label(self) -> str:
        """The last part of what names the model; of a path such as `.` the folder's own name."""
        if self.path:
            folder = user_path(self.path)
            return (folder.name if folder.name not in ("", "..") else folder.resolve().name) or self.source
        return Path(self.repo or (self.wheel.package if self.wheel else "")).name or self.source

    def check(self) -> None:
        """What can be known without fetching or loading: the directory, the device, the placement (UserError)."""
        if self.source == "path":
            sources.local_directory(str(self.path))
        _device(self.device)
        if self.device_map is not None and importlib.util.find_spec("accelerate") is None:
            raise UserError(f"model.device_map={self.device_map!r} is not possible: it needs `pip install accelerate`")

    def directory(self, *, weights: bool = True) -> Path:
        """The local transformers directory, fetched and converted where needed; `weights=False` spares the hub's."""
        if self.source == "wheel" and self.wheel:
            return self.wheel.directory()
        if self.source == "random" and self.random:
            return sources.random_directory(self.random)
        if self.source == "hub":
            return sources.hub_directory(str(self.repo), self.revision, weights=weights)
        return sources.local_directory(str(self.path))

    def config(self) -> Any:
        """The model's transformers config; no weights are loaded (UserError where there is none that can be read)."""
        return _config(self.directory(weights=False))

    @property
    def max_length(self) -> int | None:
        """Positions the model was built for, read from its config."""
        return _positions(self.config())

    def identity(self) -> dict[str, str]:
        """What pins the result: source, commit or digest, dtypes; no weights are loaded."""
        return dict(_identity(self))


@dataclass(frozen=True, kw_only=True)
class LM:
    """A loaded model.

    Attributes:
        model: transformers model, evaluation mode, no gradients.
        tokens: its tokenizer.
        kv_dtype: dtype of stored K and V.
        eos_ids: every id that ends an answer, from generation config, config and tokenizer.
        identity: `ModelSpec.identity()`.
        decoding: how answers are chosen, and which of the model's generation settings are not honoured.
    """

    model: Any
    tokens: Tokenizer
    kv_dtype: torch.dtype
    eos_ids: tuple[int, ...]
    identity: Mapping[str, str]
    decoding: str = "greedy"


@lru_cache(maxsize=1)  # one: a sweep over models must not hold two sets of weights
def load(spec: ModelSpec, attn: str = "sdpa") -> LM:
    """Fetch, convert and load; the second call with the same arguments is free.

    Args:
        spec: the model.
        attn: name of a registered transformers attention.

    Raises:
        UserError: whatever cannot be had or read; one line.
    """
    spec.check()
    directory = spec.directory()
    config = _config(directory)
    tokens = Tokenizer.load(directory, max_length=_positions(config), bytewise=spec.tokenizer == "bytes")
    return _lm(spec, _weights(spec, directory, attn), tokens)


def outline(spec: ModelSpec, attn: str = "sdpa") -> LM:
    """A model without its weights: tokenizer, config and identity are those of `load`; tensors and end tokens are not.

    It needs neither the device nor the memory of the model, only its small files. UserError as in `load`.
    """
    directory = spec.directory(weights=False)
    config = _config(directory)
    tokens = Tokenizer.load(directory, max_length=_positions(config), bytewise=spec.tokenizer == "bytes")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=_DTYPES[spec.dtype], attn_implementation=attn, trust_remote_code=False
            )
    except _CANNOT_LOAD as error:
        raise UserError(f"the model in {directory} cannot be laid out: {_first_line(error)}") from None
    return _lm(spec, model, tokens)


def _lm(spec: ModelSpec, model: Any, tokens: Tokenizer) -> LM:
    return LM(
        model=model.eval().requires_grad_(False),
        tokens=tokens,
        kv_dtype=_DTYPES[spec.kv_dtype],
        eos_ids=_stops(model, tokens),
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
    else:
        found |= sources.local_identity(str(spec.path))
    return found | {"dtype": spec.dtype, "kv_dtype": spec.kv_dtype}


def _config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except _CANNOT_LOAD as error:
        raise UserError(f"the config of the model in {directory} cannot be read: {_first_line(error)}") from None


def _weights(spec: ModelSpec, directory: Path, attn: str) -> Any:
    if spec.source in ("wheel", "random"):  # a bar for one second is noise
        transformers_logging.disable_progress_bar()
    placement = {} if spec.device_map is None else {"device_map": spec.device_map}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=_DTYPES[spec.dtype],
            attn_implementation=attn,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
            **placement,
        )
        if spec.device_map is None:
            model.to(_device(spec.device))
    except _CANNOT_LOAD as error:
        raise UserError(f"the model in {directory} cannot be loaded: {_first_line(error)}") from None
    if info["missing_keys"]:
        raise UserError(f"the model in {directory} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])} ...")
    return model


def _stops(model: Any, tokens: Tokenizer) -> tuple[int, ...]:
    found = set(tokens.eos_ids)
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(int(i) for i in found))


def _positions(config: Any) -> int | None:
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"model.device={name!r} is not possible: auto, cpu, cuda, cuda:N or mps") from None
    usable = {
        "cpu": True,
        "cuda": torch.cuda.device_count() > (device.index or 0),
        "mps": torch.backends.mps.is_available(),
    }
    require(usable.get(device.type, False), "model.device", name, "this machine has no such device")
    return device


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
