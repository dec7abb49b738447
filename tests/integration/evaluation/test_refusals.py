"""What a rule refuses while a run is under way is that arm's own record, wherever it happens; everything else goes on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from harness.calibrate import codec_limits as calibrate
from harness.engine.batches import run_halving
from harness.engine.requests import Question, Result
from harness.engine.time_limit import TimeLimitError
from harness.errors import UserError
from harness.lm_eval.encoding import Window
from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.protocols import LayerView, Scorer
from harness.stages.stack import Stack
from tests.support import tiny_models
from tests.support.asking import owned, windows
from tests.support.running import run
from tests.support.tiny_models import ids

TINY = ("model=tiny_llama", "model.device=cpu", "limit=2")


@dataclass(frozen=True)
class Refusing(Scorer):
    """Keeps the newest rows, and refuses once more than `most` tokens were seen."""

    phases: ClassVar[tuple[str, ...]] = ("prefill", "chunked", "always", "every_n")
    most: int = 0
    calls: list[int] = field(default_factory=list)

    def score(self, view: LayerView) -> Tensor:
        if view.seen > self.most:
            raise UserError(f"no more than {self.most} tokens")
        return view.pos_HN.float()


def refusing(most: int, phase: str) -> Stack:
    keep = Keep(scorer=Refusing(most=most), budget=Amount(unit="tokens", value=16), recent=4)
    return Stack(keep=keep, phase=phase, chunk=16)


def serve(jobs: list[Question[Any]]) -> dict[str, Result[Any]]:
    return owned(tiny_models.engine("llama"), jobs)


@pytest.mark.parametrize("targets", [(), ((5, 6, 7), (8, 9))])
def test_a_refusal_while_reading_compressing_answering_or_scoring_is_of_that_request(targets: tuple) -> None:
    """The kind: an arm that turns out illegal after the run has started once ended it for all arms."""
    context, held = tuple(ids(60)), tuple(ids(4, seed=1))
    stacks = {
        "full": Stack(),
        "compressing": refusing(59, "prefill"),
        "in a chunk": refusing(40, "chunked"),
        "answering": refusing(62, "always"),
        "fine": refusing(1000, "always"),
    }
    jobs = [
        Question(owner=name, prefix=context, stack=stack, held=held, max_new=0 if targets else 6, targets=targets)
        for name, stack in stacks.items()
    ]
    found = serve(jobs)
    alone = serve([job for job in jobs if job.owner in ("full", "fine")])
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(stacks, "refused") | {"full": "ok", "fine": "ok"}
    assert found["answering"].error == "no more than 62 tokens" and not found["answering"].trace
    for name, one in alone.items():
        assert found[name].answer is None or found[name].answer.ids == one.answer.ids
        for a, b in zip(found[name].scored, one.scored, strict=True):
            assert a.logp == pytest.approx(b.logp, abs=1e-4)


def test_halving_hands_a_refusal_on_alone() -> None:
    def work(part: list[int]) -> list[int]:
        if 5 in part:
            raise UserError("five is refused")
        return part

    done = run_halving(work, list(range(8)), lambda item, line, trace: (item, line), lambda item, line: line)
    assert done == [0, 1, 2, 3, 4, "five is refused", 6, 7]


def test_a_refusal_in_a_window_of_a_text_is_of_that_stack() -> None:
    engine = tiny_models.engine("llama")
    text = ids(161)
    texts = [Window(tuple(text[:81]), 80), Window(tuple(text[80:]), 80)]
    stacks = [Stack(), refusing(60, "always"), refusing(30, "prefill"), refusing(1000, "always")]
    found = windows(engine, texts, stacks)
    assert [one.status for one in found] == ["ok", "refused", "refused", "ok"]
    assert found[1].error == "no more than 60 tokens"
    assert found[0].scored == found[3].scored == 160 and found[0].exercised == 0


@pytest.mark.parametrize(
    "task", [("needle", "task.lengths=[512]", "task.per_cell=1", "task.max_new_tokens=40"), ("stream", "task.tokens=256")]
)
def test_an_arm_that_turns_out_illegal_leaves_a_report_of_the_others(task: tuple[str, ...], tmp_path: Path) -> None:
    """Found by: token groups with an exact tail under pyramid budgets, which no rule can know before layers have their share."""
    stack = ["compress=sink_h2o", "layers@compress.keep.layers=pyramid"]
    stack += [f"codec@compress.{role}=int4_token" for role in ("keys", "values")]
    found = run(tmp_path, *TINY, f"task={task[0]}", *task[1:], *stack)
    full = [record for record in found if record["stack"] == "full"]
    assert len(full) == 2 and {record["status"] for record in full} == {"ok"}
    others = Counter(record["status"] for record in found if record["stack"] != "full")
    assert others["refused"] and set(others) <= {"refused", "ok"} and sum(others.values()) == 2 * 4
    refused = next(record for record in found if record["status"] == "refused")
    assert "\n" not in refused["error"] and "exact newest tokens" in refused["error"]


def test_a_calibration_that_takes_too_long_fails_its_own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind: what fails while a stack is prepared, after the model is loaded, once left a traceback and no record."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))

    def slow(*_: object) -> None:
        raise TimeLimitError("longer than time_limit=1 s")

    with monkeypatch.context() as patched:
        patched.setattr(calibrate, "measure", slow)
        found = run(tmp_path, *TINY, "task=needle", "task.lengths=[300]", "stacks=[int8_static,int8]")
    assert Counter((record["stack"], record["status"]) for record in found) == {
        ("full", "ok"): 2,
        ("int8", "ok"): 2,
        ("int8_static", "failed"): 2,
    }
    failed = next(record for record in found if record["status"] == "failed")
    assert failed["error"].startswith("calibration: TimeLimitError: longer than time_limit=1 s")
    assert len(list((tmp_path / found[0]["run_id"] / "failures").iterdir())) == 2


def test_what_a_model_does_not_allow_is_refused_before_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by: heads that a basis or a table cannot be divided into ended the run for all stacks, or failed with a traceback.

    The kind: what is asked of this model and not possible is that stack's refusal, whenever it is found out.
    """
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    wrong = {
        "palu": "compress.keys.heads=3",
        "low_rank_weights": "compress.rope=post",
        "gqa_aligned": "compress.share.groups=3",
    }
    stacks = ",".join(f'[{name},"{change}","compress.points=[{{}}]"]' for name, change in wrong.items())
    found = run(tmp_path, *TINY, "task=needle", "task.lengths=[300]", "limit=1", f"stacks=[int8,{stacks}]")
    status = {record["stack"].split(",")[0]: (record["status"], record["error"] or "") for record in found}
    assert status["full"] == status["int8"] == ("ok", "")
    for name, words in (
        ("palu", "codec.heads=3 is not possible with 2 KV heads"),
        ("low_rank_weights", "codec.of='weights' spans keys before RoPE"),
        ("gqa_aligned", "share.groups=3 is not possible for 2 KV heads"),
    ):
        assert status[name][0] == "refused" and words in status[name][1]
    assert not (tmp_path / found[0]["run_id"] / "failures").exists()
