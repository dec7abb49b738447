"""The transformers model of a local directory: its config, its weights on a device, the ids that end its answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError  # raised by torch for weights that contain more than tensors
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from harness.errors import UserError
from harness.models.placement import usable_device

_CANNOT_LOAD = (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, SafetensorError, UnpicklingError)


def read_config(directory: Path) -> Any:
    """The transformers config of a directory; UserError if there is none or it cannot be read."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except _CANNOT_LOAD as error:
        raise UserError(f"the config of the model in {directory} cannot be read: {_first_line(error)}") from None


def positions(config: Any) -> int | None:
    """Positions a model was built for (max_position_embeddings); None if its config names no number."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def load_weights(directory: Path, dtype: torch.dtype, attn: str, device: str, device_map: str | None) -> Any:
    """The model with its weights, on `device` or placed by transformers' `device_map`; UserError if weights are missing."""
    placement = {} if device_map is None else {"device_map": device_map}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attn,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
            **placement,
        )
        if device_map is None:
            model.to(usable_device(device))
    except _CANNOT_LOAD as error:
        raise UserError(f"the model in {directory} cannot be loaded: {_first_line(error)}") from None
    if info["missing_keys"]:
        raise UserError(f"the model in {directory} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])} ...")
    return model


def without_weights(config: Any, dtype: torch.dtype, attn: str, where: str = "") -> Any:
    """The model on the meta device: modules and shapes, no memory; UserError if it cannot be built. where: it is from."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn, trust_remote_code=False)
    except _CANNOT_LOAD as error:
        kind = getattr(config, "model_type", "")
        raise UserError(f"the model{where} of type {kind!r} cannot be laid out: {_first_line(error)}") from None


def end_ids(model: Any, of_tokenizer: Sequence[int]) -> tuple[int, ...]:
    """Every id that ends an answer: of the tokenizer, the generation config and the config."""
    found = set(of_tokenizer)
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(sorted(int(i) for i in found))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
