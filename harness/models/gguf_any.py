"""A GGUF file of any architecture that transformers reads, as a transformers directory: config, float32 weights, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from harness.errors import UserError
from harness.models import gguf_model
from harness.models.gguf_tokenizer import build_tokenizer

_ENDS = ("eos", "eot", "eom")  # names of ids that end an answer or a message


def header(source: Path) -> dict[str, Any]:
    """The fields of a GGUF header; UserError if the file is none."""
    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{source} is not a GGUF file that can be read: {error}") from None
    return {name: field.contents() for name, field in reader.fields.items()}


def convert(source: Path, directory: Path) -> None:
    """Fill an existing folder with a GGUF model as transformers has it.

    Raises:
        UserError: transformers does not read the architecture, or the tokenizer is of a kind not known here.
    """
    fields = header(source)
    kind = fields.get("general.architecture")
    if kind == "llama" and fields.get("tokenizer.ggml.pre") == "smollm":
        gguf_model.convert(source, directory)
        return
    if kind not in GGUF_SUPPORTED_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_SUPPORTED_ARCHITECTURES))
        raise UserError(f"{source.name} has general.architecture={kind!r}, which transformers does not read; it reads {known}")
    tokenizer = build_tokenizer(fields)
    try:
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, NotImplementedError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"transformers cannot read {source.name} ({kind}): {first}") from None
    ends = [fields[key] for name in _ENDS if (key := f"tokenizer.ggml.{name}_token_id") in fields]
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
        config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    vars(model.config).pop("quantization_config", None)  # what is written is not quantized
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_file(_once(model.state_dict()), directory / "model.safetensors", metadata={"format": "pt"})


def _once(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of one storage once: an output layer that is tied to the embedding follows from it."""
    found = {x.data_ptr(): name for name, x in reversed(list(weights.items()))}
    return {name: x.contiguous() for name, x in weights.items() if found[x.data_ptr()] == name}
