"""Everything on a make-believe accelerator: nothing mixes devices, nothing needs float64, and a step hardly makes the host wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from harness.engine.engine import Engine
from harness.errors import UserError
from harness.kv.attention import NAME
from harness.models import packed
from harness.stages.stack import Stack
from tests.support import tiny_models
from tests.support.make_believe.accelerator import Accelerator
from tests.support.make_believe.steps import compressed, decode_steps
from tests.support.make_believe.tensors import FIRST, SECOND
from tests.support.make_believe.trial import differences, failures, spread, stacks, trial

MOST = 8  # synchronisations of a decode step
SOME = ("sink_h2o_int8", "adakv", "snapkv_chunked", "int4")


def llama(**changes: Any) -> PreTrainedModel:
    config = tiny_models.config("llama")
    config.update({"num_hidden_layers": 2} | changes)
    return tiny_models.build(config, NAME)


def host(model: PreTrainedModel) -> Engine:
    """An engine on the host that multiplies as the device does: from plain weights, not from those in oneDNN's layout."""
    with mock.patch.object(packed, "MOST", -1):
        return Engine(model, torch.bfloat16, invariant=True)


@contextmanager
def engine(model: PreTrainedModel, devices: int) -> Iterator[tuple[Accelerator, Engine]]:
    """An engine whose model lies on one or two make-believe devices that have no float64."""
    at = Accelerator(lacks=[torch.float64])
    with at.on():
        found = Engine(model.to(FIRST) if devices == 1 else spread(model), torch.bfloat16, invariant=True)
        assert found.devices == (FIRST, SECOND)[:devices]
        yield at, found
    assert at.costs.waits or not at.costs.reads


def test_everything_runs_under_every_stack_on_two_devices_and_gives_what_the_host_gives() -> None:
    with engine(llama(), 2) as (_, found):
        apart = {name: stack for name, stack in stacks().items() if _joins_layers(stack) and _refuses(found, stack)}
        assert apart and len(apart) < len(stacks())
        whole = {name: stack for name, stack in stacks().items() if name not in apart}
        alike = host(llama())
        alike.groups = found.groups  # of layers on one device: a product of more heads at once may sum in another order
        wanted = trial(alike, whole)
        assert failures(wanted) == failures(trial(host(llama()), apart)) == []
        assert differences(wanted, trial(found, whole)) == {}


def _refuses(found: Engine, stack: Stack) -> bool:
    """Whether layers that would share a store lie on several devices."""
    try:
        found.check(stack)
    except UserError as error:
        return "is not possible with this model: layers" in str(error)
    return False


def _joins_layers(stack: Stack) -> bool:
    """Whether layers share a store: refused where they lie on several devices."""
    return stack.share is not None and not stack.share.pools


@pytest.mark.parametrize(("family", "devices"), [("gpt2", 1), ("gemma3", 2)])
def test_one_device_learned_positions_and_sliding_windows_too(family: str, devices: int) -> None:
    """Two devices find what one does; so a few stacks of every kind are enough here."""
    config = tiny_models.config(family)
    some = {name: stack for name, stack in stacks().items() if name in SOME}
    wanted = trial(host(tiny_models.build(config, NAME)), some)
    with engine(tiny_models.build(config, NAME), devices) as (_, found):
        assert differences(wanted, trial(found, some)) == {}


@pytest.mark.parametrize("views", [0, 1 << 30], ids=["no views", "views"])
def test_a_decode_step_makes_the_host_wait_a_few_times_with_every_stack_in_one_batch(views: int) -> None:
    with engine(llama(), 1) as (at, run):
        rows = compressed(run, list(stacks().values()), 80)
        waits = [one.synchronisations for one in decode_steps(run, at, rows, 2, views)]
    assert len(waits) == 2 and max(waits) <= MOST


def test_how_often_the_host_waits_depends_on_no_number_of_layers_heads_or_rows() -> None:
    found = []
    for times, changes in ((1, {}), (2, {"num_hidden_layers": 3, "num_key_value_heads": 4})):
        with engine(llama(**changes), 1) as (at, run):
            rows = compressed(run, [stacks()[name] for name in SOME], 80) * times
            found.append([one.synchronisations for one in decode_steps(run, at, rows, 2)])
    assert found[0] == found[1]
