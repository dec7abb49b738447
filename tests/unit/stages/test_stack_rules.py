"""Which stages go together: every member of conf/compress is legal, every illegal pair is one line that says what is legal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from harness.errors import UserError
from harness.stages.budget import Amount
from harness.stages.codec.exact import Exact
from harness.stages.codec.fp8 import Float8
from harness.stages.codec.hadamard import Hadamard
from harness.stages.codec.int8 import Int8
from harness.stages.codec.int_groups import IntGroups
from harness.stages.keep import Keep
from harness.stages.protocols import Needs
from harness.stages.score.h2o import H2O
from harness.stages.score.recency import Recency
from harness.stages.score.snapkv import SnapKV
from harness.stages.score.tova import Tova
from harness.stages.stack import Stack
from tests.support import conf_tree


class OtherHeads:
    """Any split over heads that is not the uniform one."""

    def split(self, tokens: int, scores_HM: Any, layer: int) -> list[int]:
        return [tokens] * len(scores_HM)


def keep(scorer: Any = None, tokens: float = 64, **fields: Any) -> Keep:
    return Keep(scorer=scorer or H2O(), budget=Amount(unit="tokens", value=tokens), **fields)


def test_every_member_of_the_tree_is_a_legal_stack() -> None:
    stacks = {name: conf_tree.stack(name) for name in conf_tree.members("compress")}
    assert not stacks["full"].compresses
    assert all(stack.compresses for name, stack in stacks.items() if name != "full")
    for name in ("h2o", "sink_h2o", "sink_h2o_int8"):
        assert stacks[name].phase == "always"
        assert stacks[name].needs == Needs(column_sums=True)
        assert stacks[name].keeps_state
    assert stacks["snapkv"].needs == Needs(queries=32)
    assert not stacks["snapkv"].evicts_steps
    assert stacks["snapkv_int4"].keys.info()["axis"] == "channel"
    assert stacks["snapkv_int4"].values.info()["axis"] == "token"


def test_scores_kept_only_while_another_eviction_may_come() -> None:
    assert not Stack(keep=keep(), phase="prefill").keeps_state
    assert Stack(keep=keep(), phase="always").keeps_state
    assert not Stack(keep=keep(Tova()), phase="always").keeps_state


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"phase": "sometimes"}, r"compress\.phase='sometimes' is not possible"),
        ({"positions": "middle"}, r"compress\.positions='middle'"),
        ({"read": "never"}, r"compress\.read='never' is not possible: allowed are every_step, cached"),
        ({"keep": keep(SnapKV()), "phase": "always"}, r"compress\.phase='always' is not possible: SnapKV runs in prefill"),
        (
            {"keep": keep(), "phase": "always", "keys": IntGroups(axis="channel")},
            r"phase='always' with compress\.keys=int4 .* blocks of 32 .* legal are phase=prefill",
        ),
        (
            {"keep": keep(), "phase": "always", "keys": Int8(), "values": IntGroups(axis="channel", group=16)},
            r"phase='always' with compress\.values=int4 .* blocks of 16",
        ),
        (
            {"keep": keep(), "phase": "always", "keys": conf_tree.member("codec", "kivi2")},
            r"compress\.keys=kivi2 .* blocks of 32 .* a scale per token .* never changes \(int8_static, fp8_e4m3\)",
        ),
        (
            {"keep": keep(), "phase": "always", "keys": Hadamard(inner=IntGroups(axis="head"))},
            r"compress\.keys=hadamard_int4 .* blocks of 32",
        ),
        ({"keep": keep(heads=OtherHeads()), "phase": "always"}, r"phase='always' with keep\.heads=OtherHeads is not possible"),
    ],
)
def test_illegal_pairs_are_refused_with_what_is_legal(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        Stack(**fields)
    assert "\n" not in str(caught.value)


def test_legal_neighbours_of_the_refused_pairs() -> None:
    Stack(keep=keep(), phase="prefill", keys=IntGroups(axis="channel"), values=IntGroups(axis="channel"))
    Stack(keep=keep(heads=OtherHeads()), phase="prefill")
    Stack(keep=keep(), phase="always", keys=Int8(), values=IntGroups(axis="token"))
    Stack(phase="always", keys=IntGroups())
    for name in ("int8", "int8_static", "fp8_e4m3", "fp8_e5m2_unit", "hadamard_int4", "int2_token"):  # what the message names
        codec = conf_tree.member("codec", name)
        Stack(keep=keep(), phase="always", keys=codec, values=codec)


@pytest.mark.parametrize("phase", ["prefill", "always"])
@pytest.mark.parametrize("name", conf_tree.members("codec"))
def test_every_codec_with_every_keep_runs_or_says_what_does(name: str, phase: str) -> None:
    for member in conf_tree.members("keep"):
        chosen, codec = conf_tree.keep(member, 64), conf_tree.member("codec", name)
        even = type(chosen.heads).__name__ == "Uniform" and phase in getattr(chosen.layers, "phases", [phase])
        if phase not in chosen.scorer.phases or not even:
            continue
        sides = [codec.for_role(role) for role in ("keys", "values")]
        shared = phase == "always" and (max(one.block for one in sides) > 1 or any(one.joint for one in sides))
        with pytest.raises(UserError, match="legal are phase=prefill") if shared else nullcontext():
            Stack(keep=chosen, phase=phase, keys=codec, values=codec)


def test_an_exact_tail_that_eviction_would_cut_is_refused() -> None:
    tail = IntGroups(axis="token", residual=32)
    stack = Stack(keep=keep(recent=31), phase="always", keys=tail, values=tail)
    with pytest.raises(UserError, match=r"evicts from the 32 exact newest tokens .* keep\.recent >= 32, codec residual <= 31"):
        stack.budget(1000, lambda n: n)
    assert Stack(keep=keep(recent=32), phase="always", keys=tail, values=tail).budget(1000, lambda n: n) == 64
    frozen = conf_tree.member("codec", "fp8_e4m3")  # 32 tokens wait for one another, then none do
    with pytest.raises(UserError, match=r"evicts from the 31 exact newest tokens .* a larger budget where the scale is frozen"):
        Stack(keep=keep(tokens=30), phase="always", keys=frozen).budget(1000, lambda n: n)
    assert Stack(keep=keep(tokens=31), phase="always", keys=frozen).budget(1000, lambda n: n) == 31
    assert Stack(keep=keep(recent=0), phase="always", keys=frozen).budget(1000, lambda n: n) == 64
    assert Stack(keep=keep(recent=0), phase="prefill", keys=tail, values=tail).budget(1000, lambda n: n) == 64


def test_exact_first_rows_need_sinks_that_stay() -> None:
    codec = IntGroups(axis="token", residual=0, sinks=4)
    with pytest.raises(UserError, match=r"keys\.sinks=4 is not possible: keep\.sinks=2 .* keep\.sinks >= 4 or phase=prefill"):
        Stack(keep=keep(sinks=2), phase="always", keys=codec)
    for stack in (Stack(keep=keep(sinks=4), phase="always", keys=codec), Stack(keep=keep(), phase="prefill", keys=codec)):
        assert stack.keys.info()["sinks"] == 4
    assert "sinks" not in IntGroups().info()


def test_budget_too_small_for_this_example() -> None:
    stack = Stack(keep=Keep(scorer=Recency(), sinks=4, budget=Amount(value=0.01)))
    assert stack.budget(1000, lambda n: n) == 10
    with pytest.raises(UserError, match=r"is too small: sinks 4 \+ recent 0 need at least 4"):
        stack.budget(100, lambda n: n)


def test_auto_axes_are_resolved_by_role() -> None:
    stack = Stack(keys=IntGroups(), values=IntGroups())
    assert (stack.keys.block, stack.values.block) == (32, 1)
    assert Stack(keys=IntGroups(axis="token")).keys.block == 1


def test_labels_tell_stacks_apart() -> None:
    stacks = [
        Stack(),
        Stack(keys=Int8(), values=Int8()),
        Stack(keys=Int8()),
        Stack(keys=IntGroups(residual=32)),
        Stack(keys=IntGroups(residual=64)),
        Stack(keys=IntGroups(axis="token")),
        Stack(keys=IntGroups(bits=2)),
        Stack(keys=IntGroups(symmetric=True)),
        Stack(keys=Float8(scale="unit")),
        Stack(keys=Float8(scale="frozen")),
        Stack(keys=Float8(scale="frozen", axis="tensor")),
        Stack(keys=Float8(scale="unit"), values=Float8(scale="unit")),
        Stack(keys=Float8(), values=Float8()),
        Stack(keep=keep()),
        Stack(keep=keep(), phase="always"),
        Stack(keep=keep(sinks=4), phase="always"),
        Stack(keep=keep(recent=8), phase="always"),
        Stack(keep=keep(), keys=Int8(), values=Int8()),
    ]
    labels = [stack.describe() for stack in stacks]
    assert len(set(labels)) == len(labels), labels
    assert labels[0] == "full"


def test_case_14_a_stack_is_frozen_and_its_use_changes_nothing() -> None:
    stack = Stack(keep=keep(), keys=Int8(), values=Exact())
    before = repr(stack)
    stack.budget(1000, lambda n: n)
    assert repr(stack) == before
    with pytest.raises(AttributeError):
        stack.phase = "always"  # type: ignore[misc]
