"""Accelerators by name: memory as their makers state it, and which low-precision formats they compute in."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import require

GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """One accelerator.

    Attributes:
        memory: bytes.
        fp8: whether its matrix units take 8-bit floats.
        fp4: whether they take 4-bit floats, and floats under scales of small groups (NVFP4, MXFP4, MXFP8).
    """

    name: str
    memory: int
    fp8: bool = False
    fp4: bool = False


GPUS = {  # data sheets of the makers; GB are 10^9 bytes
    gpu.name: gpu
    for gpu in (
        Gpu("t4", 16 * GB),
        Gpu("v100_32gb", 32 * GB),
        Gpu("rtx3090", 24 * GB),
        Gpu("rtx4090", 24 * GB, fp8=True),
        Gpu("rtx5090", 32 * GB, fp8=True, fp4=True),
        Gpu("a10", 24 * GB),
        Gpu("l4", 24 * GB, fp8=True),
        Gpu("l40s", 48 * GB, fp8=True),
        Gpu("a100_40gb", 40 * GB),
        Gpu("a100_80gb", 80 * GB),
        Gpu("h100_80gb", 80 * GB, fp8=True),
        Gpu("h200", 141 * GB, fp8=True),
        Gpu("b200", 180 * GB, fp8=True, fp4=True),
        Gpu("mi300x", 192 * GB, fp8=True),
    )
}


def gpu(name: str) -> Gpu:
    """An accelerator by name; UserError names those that there are."""
    require(name in GPUS, "gpu", name, f"known are {', '.join(GPUS)}")
    return GPUS[name]
