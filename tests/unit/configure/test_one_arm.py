"""One arm is one point, however it is spelled: arms differ by what they resolve to and what is used of it."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from harness.command import execute
from harness.configure.arms import Arm, arms_of
from harness.configure.objects import with_values
from harness.records.shards import load_records
from harness.stages.codec.int8 import Int8
from harness.stages.stack import Stack, unused

pytestmark = pytest.mark.usefixtures("composing", "composed_once")
HALF = "'compress.points=[{keep.budget.value: 0.5}]'"


def of(*overrides: str) -> list[Arm]:
    return arms_of(hydra.compose("config", overrides=list(overrides)), list(overrides))


SAME = {
    "a chunk that the phase never reads": f"[snapkv,{HALF}],[snapkv,{HALF},'compress.chunk=64']",
    "a chunk under always": f"[h2o,{HALF}],[h2o,{HALF},'compress.chunk=64']",
    "a phase without evictions": "int8,[int8,'compress.phase=always'],[int8,'compress.phase=every_n','compress.every=4']",
    "a default spelled out": "int4,[int4,'codec@compress.keys=int4']",
    "a budget beside its point": f"[h2o,{HALF}],[h2o,'compress.points=[{{}}]','compress.keep.budget.value=0.5']",
    "a number as another kind": f"[h2o,{HALF},'compress.keep.sinks=0'],[h2o,'compress.points=[{{keep.budget.value: 0.50}}]']",
    "an order of keys": "[h2o,'compress.points=[{keep.sinks: 2, keep.budget.value: 0.5}]'],"
    "[h2o,'compress.points=[{keep.budget.value: 0.5, keep.sinks: 2}]']",
}


@pytest.mark.parametrize("stacks", SAME.values(), ids=SAME)
def test_two_spellings_of_one_arm_are_one_arm_that_lists_both(stacks: str) -> None:
    """The kind: what is asked for differs where what happens does not."""
    full, only = of(f"stacks=[{stacks}]")
    assert full.label == "full"
    assert len(only.spellings) == stacks.count("],") + 1 + stacks.startswith("int"), only.spellings


DIFFERENT = {
    "chunks that are read": f"[h2o_chunked,{HALF},'compress.chunk=64'],[h2o_chunked,{HALF},'compress.chunk=128']",
    "steps between evictions": f"[h2o,{HALF},'compress.phase=every_n','compress.every=4'],[h2o,{HALF},'compress.phase=every_n','compress.every=8']",
    "phases of evictions": f"[h2o,{HALF}],[h2o,{HALF},'compress.phase=every_n','compress.every=8']",
    "how the store is read": "int8,[int8,'compress.read=cached']",
}


@pytest.mark.parametrize("stacks", DIFFERENT.values(), ids=DIFFERENT)
def test_what_happens_otherwise_stays_apart(stacks: str) -> None:
    found = of(f"stacks=[{stacks}]")
    assert len(found) == 3
    assert all(len(arm.spellings) == 1 for arm in found)


def test_an_option_that_is_not_used_changes_neither_label_nor_configuration() -> None:
    plain, changed = of("compress=int8")[1], of("compress=int8", "compress.chunk=64", "compress.phase=always")[1]
    assert (changed.label, changed.config, changed.stack) == (plain.label, plain.config, plain.stack)
    assert unused(None, "always") == {"phase": "prefill", "chunk": 256, "every": 1}
    assert set(unused(object(), "chunked")) == {"every"} and set(unused(object(), "every_n")) == {"chunk"}
    assert set(unused(object(), "prefill")) == {"chunk", "every"} and Stack().chunk == 256


def test_a_run_says_so_and_another_spelling_finds_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ["model=tiny_llama", "corpus=stdlib", "progress=false", "task.lengths=[200]", "limit=1"]

    def run(*more: str) -> Path:
        overrides = [*tiny, *more]
        return execute(hydra.compose("config", overrides=overrides), overrides)[0]

    folder = run("stacks=[int8,[int8,'compress.chunk=64']]")
    assert "int8 is one point for what comes to the same: int8; int8 compress.chunk=64" in capsys.readouterr().out.splitlines()
    before = load_records(folder).records
    assert [record["stack"] for record in before] == ["full", "int8"]
    assert run("compress=int8", "compress.chunk=64") == folder
    assert load_records(folder).records == before


def test_two_labels_for_one_value_are_one_arm_with_both() -> None:
    """Found by: the second label of a stack made in Python vanished without a word."""
    stack = Stack(keys=Int8())
    (arm,) = with_values([], [("mine", stack), ("yours", Stack(keys=Int8()))])
    assert arm.label == "mine" and arm.spellings == ("mine", "yours")
