"""Masked attention over grouped keys has the bits of transformers' sdpa, which writes them out for every query head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from harness.kv.attending import grouped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("new", "past"), [(2, 40), (20, 1000), (33, 7)])
def test_grouped_keys_give_the_bits_of_repeated_ones(new: int, past: int, group: int, dtype: torch.dtype) -> None:
    """Keys and values are slices of something larger, as views of a batch are."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, new, 3 * group, 32, generator=g).to(dtype).transpose(1, 2)
    k, v = torch.randn(2, 2, 3, past + new + 9, 32, generator=g).to(dtype)[:, 1:, :, : past + new]
    mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)[None, None]
    module = SimpleNamespace(num_key_value_groups=group, is_causal=True)
    call = SimpleNamespace(module=module, scaling=0.2, kwargs={"dropout": 0.0})
    found = grouped.sdpa(call, q, k, v, mask)  # type: ignore[arg-type]
    wanted = sdpa_attention_forward(module, q, k, v, mask, scaling=0.2)[0]  # type: ignore[arg-type]
    assert torch.equal(found, wanted) and found.is_contiguous()


def test_this_torch_reads_groups_as_they_lie() -> None:
    assert grouped._reads_groups(torch.float32)
