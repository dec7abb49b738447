"""The calibration that finds retrieval heads: the score of heads made by hand, and the command on a tiny model, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.calibrate.retrieval_heads import Calibration, CopyProbe, copy_scores, main, retrieval_heads
from harness.engine.engine import Engine
from harness.kv.attention import NAME
from harness.models.load import load
from tests.integration.models.test_model_load import configured
from tests.support import conf_tree, tiny_models
from tests.support.oracles.policies import group_weights
from tests.support.recording import recording
from tests.support.tiny_models import ids
from tests.support.views import view


def test_a_head_that_copies_is_told_from_one_that_does_not() -> None:
    """Head 0 looks for the row after its own token's last appearance, head 1 at its own token, head 2 everywhere alike."""
    n, words = 12, torch.eye(16)[3:15]
    text = torch.cat((torch.eye(16)[:1], words, words))  # a first token, then twelve words twice
    before = torch.cat((torch.eye(16)[1:2], text[:-1]))  # what each token follows
    keys = torch.stack((before, text, torch.zeros_like(text)))
    queries = torch.stack((text, text, text)) * 40
    probe = CopyProbe(n)
    probe.score(view(queries, keys, layer=5))
    found = probe.found[5]
    assert found.shape == (3,)
    assert float(found[0]) > 0.99
    assert float(found[1]) < 0.01
    assert 1 / 26 < float(found[2]) < 1 / 13


def test_heads_of_one_group_are_averaged_and_the_best_share_is_taken() -> None:
    scores = {0: torch.tensor([0.1, 0.5]), 3: torch.tensor([0.5, 0.2])}
    assert retrieval_heads(scores, 0.5) == [[0, 1], [3, 0]]
    assert retrieval_heads(scores, 0.25) == [[0, 1]], "of equal scores the earlier head"
    assert retrieval_heads(scores, 0.26) == [[0, 1], [3, 0]], "rounded up"
    assert retrieval_heads(scores, 1.0) == [[0, 0], [0, 1], [3, 0], [3, 1]]


def test_the_command_writes_a_list_that_duo_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in ("one.json", "two.json"):
        main(["model=tiny_llama", "tokens=40", "repeats=2", "share=0.3", f"out={out}"])
    assert "3 of 8 KV heads of tiny_llama retrieve: one.json" in capsys.readouterr().out
    found = json.loads(Path("one.json").read_text())
    assert found == json.loads(Path("two.json").read_text()), "the same command finds the same heads"
    assert len(found["heads"]) == 3
    assert {len(row) for row in found["scores"].values()} == {2}
    stack = conf_tree.stack("duo", "keep.heads.file=one.json", "keep.budget.unit=tokens", "keep.budget.value=50")
    engine = Engine(load(configured("tiny_llama"), NAME).model, torch.float32)
    row = engine.compress(engine.prefill(ids(300)), stack)
    # 18 rows beyond the protected 32, 8 heads: 144 over three retrieval heads
    assert sum(n for layer in row.held() for n in layer) == 8 * 50
    for layer, heads in enumerate(row.held()):
        for head, n in enumerate(heads):
            assert (n > 32) == ([layer, head] in found["heads"])


def test_scores_of_a_model_equal_the_oracle_on_its_own_queries_and_keys() -> None:
    engine, n = tiny_models.engine("llama"), 10
    with recording(engine.shape.full_layers) as recorded:
        found = copy_scores(engine, [1], Calibration(tokens=n, repeats=2))
    for layer in engine.shape.full_layers:
        assert [q.shape[1] for q, _ in recorded[layer]] == [1 + 2 * n] * 2
        for head in range(2):
            wanted = sum(group_weights(q, k, head, 1 + n + i)[1 + i + 1] for q, k in recorded[layer] for i in range(n - 1)) / (
                2 * (n - 1)
            )
            assert float(found[layer][head]) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model=nosuch"], "model=nosuch is not there"),
        (["model=tiny_llama", "share=0"], "share=0.0 is not possible"),
        (["model=tiny_llama", "tokens=1"], "tokens=1 is not possible"),
        (["model=tiny_llama", "tokens=many"], "tokens=many is not possible"),
        (["model=tiny_llama", "tokens=9000"], "two copies take 18001 positions, the model has 8192"),
        (["model=tiny_llama", "task=needle"], "task=needle is not possible"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("error: ")
