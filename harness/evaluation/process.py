"""What a run sets for its whole process: seeds, deterministic algorithms, and memory that the C library keeps."""

from __future__ import annotations

import ctypes
import os
import platform

import torch

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # as glibc's malloc.h numbers them
KEPT = 1 << 29  # bytes free at the end of the heap: a few layers' worth of what a prefill makes
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")  # whoever set one knows


def reproducible(seed: int) -> None:
    """Seed what draws from torch's own generator, and have torch choose deterministic algorithms where it has them."""
    torch.manual_seed(seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when it starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, hides nothing here
    torch.backends.cudnn.benchmark = False


def keep_memory() -> None:
    """Have glibc keep what tensors give back for the rest of the process: for commands, not for a library's callers.

    Every layer asks for the sizes of the one before. By default they go back to the system, which maps them anew and fills them
    with zeros, page by page. Another C library does as it does, and so does one that the user has set.
    """
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in SETTINGS):
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_MAX, 0)  # no block, however large, has a mapping of its own, which would go back at once
        libc.mallopt(TRIM_THRESHOLD, KEPT)
