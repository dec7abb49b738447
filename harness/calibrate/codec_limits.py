"""How large keys and values get on calibration text, read through the exact prefill; kept in the user cache by content hash.

Codecs ask for limits and get them, whatever their number format.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save_file
from torch import Tensor

from harness.calibrate.sensitivity import sensitivity
from harness.engine.answers import Prefix
from harness.engine.engine import Engine
from harness.errors import UserError
from harness.files.package_data import cache_root, once, sha256_of
from harness.models.load import LM
from harness.stages.codec.by_layer import ByLayer
from harness.stages.limits import Calibration, Limits
from harness.stages.stack import Stack

FORMAT = 1  # of the table and of how it is measured; part of its address
FILE = "limits.safetensors"
ROLES = ("keys", "values")


def calibrated(stack: Stack, engine: Engine, lm: LM) -> Stack:
    """The stack, with limits for those of its codecs that ask for some.

    Raises:
        UserError: the text cannot be had, or a table that the configuration pins is not what was measured.
    """
    for role in ROLES:
        codec = getattr(stack, role)
        if codec.calibration is not None:
            if isinstance(codec, ByLayer):
                found = sensitivity(engine, lm, codec, codec.calibration, role)
            else:
                found = limits(engine, lm, codec.calibration)[role]
            stack = replace(stack, **{role: codec.calibrated(found)})
    return stack


def limits(engine: Engine, lm: LM, wanted: Calibration) -> dict[str, Limits]:
    """Limits of "keys" and of "values", measured the first time they are asked for."""
    windows = list(_windows(lm, wanted))
    about = {
        "corpus": wanted.corpus.name,
        "corpus_sha256": wanted.corpus.digest,
        "tokens": sum(len(w) for w in windows),
        "window": wanted.window,
        "percentile": float(wanted.percentile),
    }
    address = json.dumps({"format": FORMAT, "model": dict(lm.identity), **about, "ids": _digest(windows)}, sort_keys=True)
    target = cache_root() / "calibration" / hashlib.sha256(address.encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        if engine.device.type == "meta":
            raise UserError("codec.calibration: its limits are not measured yet, which takes the model's weights")
        save_file(measure(engine, windows, wanted.percentile), folder / FILE)

    file = once(target, build, f"measuring keys and values on {about['tokens']} tokens of {wanted.corpus.name}") / FILE
    table = sha256_of(file)
    if wanted.table not in (None, table):
        raise UserError(f"codec.calibration.table={wanted.table!r} is not possible: this model and text give {table}")
    tensors = load_bytes(file.read_bytes())  # a mapped file could change under a long run
    return {role: Limits(_of_role(tensors, role), {**about, "table": table}) for role in ROLES}


def measure(engine: Engine, windows: Sequence[Sequence[int]], percentile: float) -> dict[str, Tensor]:
    """|x| at the percentile (nearest rank) over all tokens, fp32 [h, D], named ROLE.LAYER for every full layer.

    Each window is a prefill of its own. Only as many of the largest values are held as the percentile leaves above itself.
    """
    n = sum(len(ids) for ids in windows)
    largest = n - math.ceil(percentile / 100 * n) + 1
    top: dict[str, Tensor] = {}
    for ids in windows:
        for name, x_HND in _rows(engine.prefill(ids), engine.shape.full_layers):
            found = x_HND.float().abs().topk(min(largest, len(ids)), dim=1).values
            if name in top:
                found = torch.cat((top[name], found), 1)
                found = found.topk(min(largest, found.shape[1]), dim=1).values
            top[name] = found
    return {name: found[:, largest - 1].contiguous().cpu() for name, found in top.items()}


def _rows(prefix: Prefix, layers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """(ROLE.LAYER, exact rows [h, N, D]) of a prefix."""
    for layer in layers:
        ((part, at),) = prefix.row.slots[layer]
        yield f"keys.{layer}", part.keys.exact()[at]
        yield f"values.{layer}", part.values.exact()[at]


def _windows(lm: LM, wanted: Calibration) -> Iterator[list[int]]:
    """Token ids of the text's start, in windows that begin as the model expects."""
    ids: list[int] = []
    for document in wanted.corpus.documents():
        ids += lm.tokens.encode(document + "\n\n")
        if len(ids) >= wanted.tokens:
            break
    ids = ids[: wanted.tokens]
    bos = list(lm.tokens.bos_ids)
    size = min(wanted.window, lm.tokens.max_length or wanted.window) - len(bos)
    if size < 1:
        raise UserError(f"codec.calibration.window={wanted.window} is not possible: it must exceed the model's first token")
    return ([*bos, *ids[at : at + size]] for at in range(0, len(ids), size))


def _digest(windows: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(repr([list(w) for w in windows]).encode()).hexdigest()


def _of_role(tensors: dict[str, Tensor], role: str) -> dict[int, Tensor]:
    return {int(name.split(".")[1]): t for name, t in tensors.items() if name.startswith(f"{role}.")}
