"""What codecs ask to have measured on calibration text: how large numbers get, codebooks, or bases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from harness.calibrate.calibration_text import ROLES, CalibrationText, exact_rows, of_role
from harness.calibrate.codebooks import codebooks
from harness.calibrate.low_rank_bases import bases
from harness.calibrate.sensitivity import sensitivity
from harness.calibrate.share_tables import measured_share
from harness.engine.engine import Engine
from harness.errors import UnfitStackError, UserError
from harness.kv.memory import check_codecs
from harness.models.load import LM
from harness.stages.codec.base import Codec
from harness.stages.codec.by_layer import ByLayer
from harness.stages.limits import Calibration, Limits
from harness.stages.stack import Stack

FORMAT = 1  # of the table and of how it is measured; part of its address
FILE = "limits.safetensors"


def calibrated(stack: Stack, engine: Engine, lm: LM) -> Stack:
    """The stack, with limits for those of its codecs that ask for some, and with what its sharing asks for.

    Raises:
        UnfitStackError: the model has no use for this stack, or lacks what is to be measured.
        UserError: the text cannot be had, or a table that the configuration pins is not what was measured.
    """
    try:
        engine.check(stack)
        check_codecs(stack, engine.shape)
    except UserError as error:
        raise UnfitStackError(str(error)) from None
    for role in ROLES:
        codec: Codec = getattr(stack, role)
        if codec.calibration is None and codec.span is None:
            continue
        measured = codec.calibrated(_found(engine, lm, codec, role, unrotated=stack.unrotated and role == "keys"))
        stack = replace(stack, keys=measured) if role == "keys" else replace(stack, values=measured)
    if stack.share is not None and stack.share.calibration is not None:
        stack = replace(stack, share=measured_share(engine, lm, stack.share, stack.share.calibration))
    return stack


def _found(engine: Engine, lm: LM, codec: Codec, role: str, *, unrotated: bool) -> Limits:
    """What a codec of keys or values asks for."""
    if codec.span is not None:
        return bases(engine, lm, codec.calibration, codec.span, role, unrotated=unrotated)
    assert codec.calibration is not None
    if isinstance(codec, ByLayer):
        return sensitivity(engine, lm, codec, codec.calibration, role)
    if codec.fitting is not None:
        return codebooks(engine, lm, codec.calibration, codec.fitting, role, unrotated=unrotated)
    return limits(engine, lm, codec.calibration, unrotated=unrotated)[role]


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
