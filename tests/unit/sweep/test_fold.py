"""Which combinations of a sweep share a job, and how a job carries stacks that were changed in different ways."""

from __future__ import annotations

import itertools

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.configure.arms import Arm, arms_of
from harness.errors import UserError
from harness.sweep.fold import Job, deferred, fold

pytestmark = pytest.mark.usefixtures("composing", "composed_once")


def jobs(*arguments: str) -> list[Job]:
    return fold(OverridesParser.create().parse_overrides(deferred(arguments)))


def of(overrides: list[str]) -> list[Arm]:
    return arms_of(hydra.compose("config", overrides=overrides), overrides)


def test_what_differs_only_in_the_stack_is_one_job() -> None:
    found = jobs("seed=0,1", "compress=int8,h2o", "limit=3")
    assert [job.overrides for job in found] == [
        ["seed=0", "limit=3", "stacks=[int8,h2o]"],
        ["seed=1", "limit=3", "stacks=[int8,h2o]"],
    ]


def test_without_a_swept_stack_jobs_stay_as_they_were_written() -> None:
    assert [job.overrides for job in jobs("seed=range(0,2)", "compress=h2o")] == [
        ["seed=0", "compress=h2o"],
        ["seed=1", "compress=h2o"],
    ]
    assert [job.overrides for job in jobs("task=needle,stream")] == [["task=needle"], ["task=stream"]]


SWEPT = {
    "names": (["compress=int8,h2o,tova"], {}),
    "a value": (["compress=h2o,tova", "compress.keep.budget.value=0.1,0.2"], {}),
    "a part and a value": (["compress=h2o", "codec@compress.keys=int8,exact", "compress.keep.budget.value=0.3"], {}),
    "a list of points": (["compress=h2o,snapkv", "compress.points=[{keep.budget.value: 0.5},{keep.sinks: 2}]"], {}),
}


@pytest.mark.parametrize("arguments", [value[0] for value in SWEPT.values()], ids=SWEPT)
def test_a_folded_job_has_the_arms_of_its_parts(arguments: list[str]) -> None:
    (job,) = jobs(*arguments)
    apart = itertools.chain.from_iterable(of(one.overrides) for one in job.split())
    wanted = {(arm.name, repr(arm.config)) for arm in apart}
    assert {(arm.name, repr(arm.config)) for arm in of(job.overrides)} == wanted
    assert len(job.split()) == len(set(job.stacks)) > 1


def test_overrides_with_quotes_commas_and_signs_arrive_whole() -> None:
    text = r"a, [b]=c \'d\' {e} \f"
    (job,) = jobs("compress=int8,h2o", f"+compress.note='{text}'", "compress.phase=prefill")
    _, (name, note, phase) = OverridesParser.create().parse_override(job.overrides[-1]).value()
    assert (name, phase) == ("h2o", "compress.phase=prefill")
    before, after = (OverridesParser.create().parse_override(o) for o in (f"+compress.note='{text}'", note))
    assert after.value() == before.value() == r"a, [b]=c 'd' {e} \f"
    assert after.get_key_element() == "+compress.note"


def test_a_stack_may_carry_its_own_overrides_in_a_list() -> None:
    found = of(["stacks=[int8,[h2o,'compress.keep.budget.value=0.3']]"])
    assert [arm.name for arm in found] == ["full", "int8", "h2o keep.budget.value=0.3"]


REFUSED = {
    "an interval": (["seed=interval(0,1)"], "range(a,b)"),
    "stacks= and compress=": (["stacks=[int8]", "compress=h2o,tova"], "together with stacks="),
}


@pytest.mark.parametrize("arguments, wanted", REFUSED.values(), ids=REFUSED)
def test_refused(arguments: list[str], wanted: str) -> None:
    with pytest.raises(UserError, match=wanted.replace("(", r"\(").replace(")", r"\)")):
        jobs(*arguments)


@pytest.mark.parametrize("member", ["[h2o,'seed=1']", "[h2o,'compress=tova']", "[]", "3"])
def test_a_member_of_stacks_that_is_no_stack_is_refused(member: str) -> None:
    with pytest.raises(UserError, match="stacks"):
        of([f"stacks=[int8,{member}]"])
