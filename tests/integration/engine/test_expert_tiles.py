"""Mixtures of experts under `batch_invariant`: how many tokens an expert is given changes no bit of any request."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.families.tiny import build, families, tiny_config
from harness.kv.attention import NAME
from harness.kv.sequence_cache import SequenceCache
from harness.stages.stack import Stack
from tests.support import conf_tree
from tests.support.tiny_models import ids

MIXTURES = ("gpt_oss", "llama4_text", "mixtral", "qwen3_moe", "granitemoe", "olmoe")


def engine(family: str) -> Engine:
    if family not in families():
        pytest.skip("this version of transformers has no such family")
    try:
        return Engine(build(tiny_config(family), NAME), torch.float32, invariant=True)
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_do_not_depend_on_company(family: str) -> None:
    run, stack = engine(family), Stack(keep=conf_tree.keep("streaming", 24), phase="always")
    prefixes = [run.prefill(ids(n, seed=n)) for n in (60, 37, 41)]
    rows = [run.compress(prefix, one) for prefix in prefixes for one in (Stack(), stack)] * 3
    feed = [ids(1 + (3 * i) % 7, seed=i) for i in range(len(rows))]

    def logits(some: list[int]) -> dict[int, Tensor]:
        held: list[SequenceCache] = [rows[i] for i in some]
        tokens, found = [feed[i] for i in some], []
        for step in range(3):
            held, out = run.feed(held, tokens)
            found.append(out)
            tokens = [[(7 * step + i) % 50 + 3] for i in some]
        return {i: torch.stack([out[b] for out in found]) for b, i in enumerate(some)}

    alone = {i: one for k in range(len(rows)) for i, one in logits([k]).items()}
    for some in (list(range(len(rows))), [5, 1, 9]):
        for i, one in logits(some).items():
            assert torch.equal(one, alone[i]), i


@pytest.mark.parametrize("odd", [False, True])
def test_a_promise_that_does_not_hold_is_not_made(odd: bool) -> None:
    """A model whose numbers move with the size of a batch is found out when it is prepared."""
    model = build(tiny_config("llama"), NAME)
    if odd:
        model.model.norm.register_forward_hook(lambda module, args, out: out * (1 + 1e-6 * out.shape[0]))
    assert Engine(model, torch.float32, invariant=True).invariant is not odd
