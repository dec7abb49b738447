"""How many bytes work takes beside what it leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def transient_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """The most bytes that torch held at once while `work` ran, less those it still held at the end, or at the start if less.

    What `work` returns is held. On a CPU torch's profiler lists every allocation, on CUDA the allocator keeps a peak; of
    another device neither is known: None. Memory that a library takes for itself, past torch's allocators, is not in it.
    """
    if device.type == "cuda":
        return _of_cuda(work, device)
    return _of_cpu(work) if device.type == "cpu" else None


def peak_above_end(changes: Iterable[int]) -> int:
    """The highest sum of these changes, from the start on, above the last one or above the start, whichever is higher."""
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak - max(level, 0)


def _of_cpu(work: Callable[[], object]) -> int:
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        held = work()
    results: Any = seen.profiler
    allocations = [one for one in results.kineto_results.events() if one.name() == "[memory]"]
    del held
    return peak_above_end(one.nbytes() for one in sorted(allocations, key=lambda one: one.start_ns()))


def _of_cuda(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    held = work()
    torch.cuda.synchronize(device)
    found = torch.cuda.max_memory_allocated(device) - max(torch.cuda.memory_allocated(device), before)
    del held
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """Some builds of the profiler write a line to the process's own stderr whenever it starts and stops."""
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)
