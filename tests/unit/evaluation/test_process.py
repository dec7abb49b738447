"""What a run sets for its whole process."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from harness.evaluation.process import keep_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has its own way with memory")
def test_tensors_of_the_same_sizes_take_the_same_memory_again() -> None:
    def layer() -> None:
        held = [torch.ones(1 << 21) for _ in range(4)]  # 32 MiB, 8,192 pages
        assert len(held) == 4

    keep_memory()
    layer()
    layer()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layer()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1024
