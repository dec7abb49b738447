"""The memory that attention's keys and values are decoded into."""

from __future__ import annotations

import torch

from harness.kv.attending.scratch import Scratch


def test_keys_and_values_of_any_size_lie_apart_in_one_memory() -> None:
    scratch, key, value = Scratch(), torch.zeros(1, 3, 2, 5), torch.zeros(1, 3, 2, 7)
    pairs = [scratch.pair(key, value, n) for n in (4, 33, 4)]
    for (k, v), n in zip(pairs, (4, 33, 4), strict=True):
        assert (k.shape, v.shape) == ((1, 3, n, 5), (1, 3, n, 7)) and k.is_contiguous() and v.is_contiguous()
        k.fill_(1.0)
        v.fill_(2.0)
        assert bool((k == 1.0).all()) and bool((v == 2.0).all())
    assert pairs[1][0].data_ptr() == pairs[2][0].data_ptr()  # what a smaller call leaves, a larger one writes over


def test_what_was_handed_out_stays_readable_when_more_is_asked_for() -> None:
    scratch, x = Scratch(), torch.zeros(2, 1, 1, 8)
    small, _ = scratch.pair(x, x, 3)
    small.fill_(3.0)
    scratch.pair(x, x, 300)[0].fill_(4.0)
    assert bool((small == 3.0).all())


def test_dtypes_do_not_share() -> None:
    scratch, x = Scratch(), torch.zeros(1, 1, 1, 8)
    k, v = scratch.pair(x, x, 3)
    half, _ = scratch.pair(x.bfloat16(), x.bfloat16(), 3)
    assert (k.dtype, v.dtype, half.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert k.data_ptr() != half.data_ptr()
