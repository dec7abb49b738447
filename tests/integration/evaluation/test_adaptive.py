"""`limit=auto`: documents are added until every arm is resolved, each takes its own number, and what is said of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.analysis.clusters import paired
from harness.analysis.frontier import rank
from harness.analysis.points import points
from harness.errors import UserError
from harness.evaluation.adaptive import Adaptive, rounds
from harness.notebook import evaluate
from harness.records.current import current_records
from harness.records.progress import state
from tests.support.record_factory import make

pytestmark = pytest.mark.usefixtures("composed_once")


@dataclass(frozen=True)
class Arm:
    label: str
    name: str


@dataclass(frozen=True)
class Example:
    id: str
    group_id: str


@dataclass(frozen=True)
class Asked:
    """What `Adaptive` reads of a planned record."""

    arm: Arm
    example: Example
    seed: int = 0

    @property
    def key(self) -> str:
        return f"{self.arm.name} {self.example.id} {self.seed}"


class Told:
    """A store whose arms lose a share of their answers."""

    def __init__(self, losses: dict[str, float]) -> None:
        self.losses, self.made, self.rng = losses, dict[str, dict[str, Any]](), np.random.default_rng(0)
        self.read = 0

    def make(self, part: list[Asked]) -> None:
        for one in part:
            lost = one.arm.name != "full" and self.rng.random() < self.losses[one.arm.name]
            self.made[one.key] = make(key=one.key, score=float(not lost))

    def fresh(self) -> list[dict[str, Any]]:
        found = list(self.made.values())[self.read :]
        self.read += len(found)
        return found


def test_an_arm_stops_once_it_is_resolved_and_the_others_go_on() -> None:
    """A bad arm is seen at once, a good one takes longer; the full cache is on everything that any arm needs."""
    names = ["full", "good", "bad"]
    planned = [Asked(Arm(n, n), Example(f"e{i}", f"d{i}")) for i in range(900) for n in names]
    told = Told({"good": 0.01, "bad": 0.6})
    adaptive: Any = Adaptive(planned, told, 0.05)  # type: ignore[arg-type]
    for part in adaptive:
        told.make(part)
    counts = {name: sum(key.startswith(f"{name} ") for key in told.made) for name in names}
    assert adaptive.left == [] and adaptive.took == {name: counts[name] for name in ("bad", "good")}
    assert counts["bad"] < 30 < counts["good"] == counts["full"] < 900


def test_an_arm_that_says_nothing_keeps_no_round_going() -> None:
    """Found by: an arm whose calibration had failed was asked, with the full cache, on every document there was.

    The kind: only an arm that more documents could resolve asks for them; others go along.
    """
    names = ["full", "good", "broken"]

    class Broken(Told):
        def make(self, part: list[Asked]) -> None:
            super().make([one for one in part if one.arm.name != "broken"])
            dead = [one for one in part if one.arm.name == "broken"]
            self.made |= {one.key: make(key=one.key, score=None, status="failed", error="calibration") for one in dead}

    def asked(labels: list[str]) -> tuple[dict[str, int], Any]:
        planned = [Asked(Arm(n, n), Example(f"e{i}", f"d{i}")) for i in range(900) for n in labels]
        told = Broken({"good": 0.6})
        adaptive: Any = Adaptive(planned, told, 0.05)  # type: ignore[arg-type]
        for part in adaptive:
            told.make(part)
        return {name: sum(key.startswith(f"{name} ") for key in told.made) for name in labels}, adaptive

    counts, adaptive = asked(names)
    assert counts["full"] == counts["good"] == counts["broken"] < 30 and adaptive.left == ["broken"]
    assert asked(["full", "broken"])[0] == {"full": 12, "broken": 12}


def test_a_document_is_one_unit_whatever_the_seeds_of_its_questions() -> None:
    """Found by: 40 documents with five seeds were 200 units; ids that two seeds share were taken for one another."""
    arms = [Arm("full", "full"), Arm("good", "good")]
    planned = [Asked(arm, Example(f"e{i}", f"d{i}"), seed) for seed in range(5) for i in range(40) for arm in arms]
    told = Told({"good": 0.0})
    adaptive: Any = Adaptive(planned, told, 0.001)  # type: ignore[arg-type]
    first = next(iter(adaptive))
    assert len(first) == 12 * 5 * 2 and len({one.example.group_id for one in first}) == 12
    told.made = {one.key: make(key=one.key, score=float(one.seed > 0)) for one in first if one.arm.label == "full"}
    told.made |= {one.key: make(key=one.key, score=0.0) for one in first if one.arm.label == "good"}
    adaptive._take_in()
    assert paired(adaptive._pairs(first[:10], "good")).differences.tolist() == [-0.8]


def test_rounds_grow_up_to_the_pool() -> None:
    found = rounds(100)
    assert found[0] == 12 and found[-1] == 100 and found == sorted(set(found))
    assert rounds(3) == [3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Text that repeats itself, which the small model's random answers never hold: every arm equals the full cache, at 0."""
    place = tmp_path_factory.mktemp("auto")
    yield place


def run(folder: Path, **more: Any) -> Any:
    settings = {"task.lengths": [256], "task.per_cell": 10, "task.max_new_tokens": 8, "precision": 0.4, **more}
    return evaluate(model="tiny_llama", stacks=["int8", "streaming"], limit="auto", results_dir=str(folder), **settings)


def test_a_run_ends_when_all_are_resolved_and_says_how_many_it_took(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(folder)
    said = capsys.readouterr().out
    assert "int8: resolved by " in said
    table = made.points
    assert table["adaptive"].all() and table["left_out"].isna().sum() >= 2
    assert table["n"].max() < 50  # of the 50 there are
    low, high = table.loc[table["stack"] == "int8", ["diff_lo", "diff_hi"]].iloc[0]
    assert low < 0 < high and (high - low) / 2 <= 0.4 + 1e-9
    assert state(made.folder).total("missing") == 0  # what was not asked for is not missing
    again = run(folder)
    assert len(again.records) == len(made.records)
    assert len(current_records(made.folder)[0].records) == len(made.records)


def test_more_precision_goes_on_from_there(folder: Path) -> None:
    before, after = run(folder), run(folder, precision=0.25)
    assert len(after.records) > len(before.records)
    assert after.folder == before.folder


def test_scores_without_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="limit=auto is not possible"):
        evaluate(
            model="tiny_llama", stacks=["int8"], task="stream", limit="auto", results_dir=str(tmp_path),
            **{"task.tokens": 64, "task.context": 32, "task.chunk": 16, "task.documents": 2},
        )  # fmt: skip


def test_a_point_that_was_stopped_early_keeps_its_place(tmp_path: Path) -> None:
    """Fewer examples than others leave a point out of the frontier, unless that many resolved it."""

    def records(adaptive: bool) -> list[dict[str, Any]]:
        unit = [{"example_id": f"e{i}", "group_id": f"g{i}", "adaptive": adaptive} for i in range(20)]
        full = [make(**one) for one in unit]
        small = [make(**one, stack="int8", stack_config={"keep": None}, kv_bytes_context=10) for one in unit[:12]]
        return full + small

    stopped, cut = (rank(points(records(adaptive))).set_index("stack") for adaptive in (True, False))
    assert stopped.loc["int8", "on_frontier"] and not cut.loc["int8", "on_frontier"]
    assert cut.loc["int8", "left_out"] == "scored on 12 of 20 examples"
