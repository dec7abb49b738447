"""What codecs ask to have measured on calibration text: how large keys and values get, or codebooks fitted to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.calibrate.calibration_text import ROLES, CalibrationText, exact_rows, of_role
from harness.calibrate.codebooks import codebooks
from harness.engine.engine import Engine
from harness.models.load import LM
from harness.stages.codec.base import Codec
from harness.stages.limits import Calibration, Limits
from harness.stages.stack import Stack

FORMAT = 1  # of the table and of how it is measured; part of its address
FILE = "limits.safetensors"


def calibrated(stack: Stack, engine: Engine, lm: LM) -> Stack:
    """The stack, with limits for those of its codecs that ask for some.

    Raises:
        UserError: the text cannot be had, or a table that the configuration pins is not what was measured.
    """
    if stack.unrotated and None in engine.ropes:
        return stack  # the model refuses this stack when it is run, and no other
    for role in ROLES:
        codec: Codec = getattr(stack, role)
        if codec.calibration is None:
            continue
        unrotated = stack.unrotated and role == "keys"
        if codec.fitting is not None:
            found: Limits = codebooks(engine, lm, codec.calibration, codec.fitting, role, unrotated=unrotated)
        else:
            found = limits(engine, lm, codec.calibration, unrotated=unrotated)[role]
        measured = codec.calibrated(found)
        stack = replace(stack, keys=measured) if role == "keys" else replace(stack, values=measured)
    return stack


def limits(engine: Engine, lm: LM, wanted: Calibration, *, unrotated: bool = False) -> dict[str, Limits]:
    """Limits of "keys" and of "values", measured the first time they are asked for. unrotated: those of keys before RoPE."""
    text = CalibrationText.of(lm, wanted)
    basis = {"rope": "pre"} if unrotated else {}
    tensors, about = text.table(
        engine, FILE, {"format": FORMAT, **basis}, lambda: measure(engine, text.windows, wanted.percentile, unrotated)
    )
    return {role: Limits(of_role(tensors, role), about | basis) for role in ROLES}


def measure(engine: Engine, windows: Sequence[Sequence[int]], percentile: float, unrotated: bool = False) -> dict[str, Tensor]:
    """|x| at the percentile (nearest rank) over all tokens, fp32 [h, D], named ROLE.LAYER for every full layer.

    Each window is a prefill of its own. Only as many of the largest values are held as the percentile leaves above itself.
    """
    n = sum(len(ids) for ids in windows)
    largest = n - math.ceil(percentile / 100 * n) + 1
    top: dict[str, Tensor] = {}
    for ids in windows:
        for name, x_HND in exact_rows(engine, ids, unrotated=unrotated):
            found = x_HND.float().abs().topk(min(largest, len(ids)), dim=1).values
            if name in top:
                found = torch.cat((top[name], found), 1)
                found = found.topk(min(largest, found.shape[1]), dim=1).values
            top[name] = found
    return {name: found[:, largest - 1].contiguous().cpu() for name, found in top.items()}
