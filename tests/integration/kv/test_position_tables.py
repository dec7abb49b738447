"""Models with a learned table of positions: what would go past it is refused in one line, on every path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, OPTConfig, PretrainedConfig

from harness.engine.engine import Engine
from harness.engine.requests import Question, Result
from harness.errors import UserError
from harness.kv.attention import NAME
from harness.kv.positions import learned_positions
from harness.lm_eval.encoding import Window
from harness.stages.stack import Stack
from tests.support import conf_tree, tiny_models
from tests.support.asking import results, windows
from tests.support.running import VOCABULARY, on_disk, run
from tests.support.tiny_models import build, ids

PLACES = 128
TABLE = f"beyond this model's positions: its learned table has {PLACES}"


def settings(kind: str) -> PretrainedConfig:
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=PLACES, bos_token_id=1, eos_token_id=2
        )
    sizes = {"hidden_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return OPTConfig(vocab_size=VOCABULARY, max_position_embeddings=PLACES, **sizes)


@pytest.fixture(scope="module", params=["gpt2", "opt"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(kind: str) -> Engine:
    return Engine(build(settings(kind), NAME), torch.float32)


def test_who_has_a_table() -> None:
    assert {family: learned_positions(tiny_models.tiny(family)) for family in ("llama", "phi3", "gemma3", "gpt2")} == {
        "llama": None, "phi3": None, "gemma3": None, "gpt2": 1024,
    }  # fmt: skip


def test_the_last_place_is_used_and_none_after_it(engine: Engine) -> None:
    """The kind: an index error deep in the model for every request of a batch, where a line for one of them is due."""
    chunked = Stack(keep=conf_tree.keep("streaming", 32), phase="chunked", chunk=16)

    def status(n: int, stack: Stack, **more: object) -> Result[Any]:
        return results(engine, [Question(owner=None, prefix=tuple(ids(n)), stack=stack, held=(5, 6), **more)])[0]

    for stack in (Stack(), chunked):
        for more in ({"max_new": 7}, {"targets": ((5,) * 7,)}):
            assert status(PLACES - 8, stack, **more).status == "ok"  # 8 more are fed, the last token never is
            beyond = status(PLACES - 7, stack, **more)
            assert (beyond.status, beyond.trace) == ("refused", "")
            assert beyond.error is not None and TABLE in beyond.error
    for n, expected in ((PLACES + 1, "ok"), (PLACES + 2, "refused")):
        (found,) = windows(engine, [Window(tuple(ids(n)), n - 1)], [Stack()])
        assert found.status == expected
    for wrong in (lambda: engine.prefill(ids(PLACES + 1)), lambda: engine.feed([engine.start()], [ids(PLACES + 1)])):
        with pytest.raises(UserError, match=TABLE):
            wrong()


def test_a_stream_past_the_table_is_refused_as_a_question_is(kind: str, tmp_path: Path) -> None:
    """Found by: a stream of 200 tokens on a table of 128, an index error for every point."""
    here = on_disk(tmp_path / "model", settings(kind))
    for tokens, status in ((PLACES + 1, "ok"), (200, "refused")):
        for phase in ("compress=streaming", "compress=int8"):
            found = run(tmp_path / "out", *here, "task=stream", f"task.tokens={tokens}", "task.documents=1", phase)
            assert {record["status"] for record in found} - {"not_exercised"} == {status}
            assert all(status == "ok" or TABLE in record["error"] for record in found)
    mine = tmp_path / "mine.jsonl"
    lines = [{"context": "word " * n, "question": "Which?", "answers": ["word"]} for n in (4, 400)]
    mine.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="the model has 128"):
        run(tmp_path / "out", *here, "task=jsonl", f"task.path={mine}")


def test_what_is_measured_once_stays_inside_the_table(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.calibrate import retrieval_heads

    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    here = on_disk(tmp_path / "model", settings(kind))
    few = [f"compress.{role}.calibration.tokens=512" for role in ("keys", "values")]
    found = run(tmp_path / "out", *here, "task=stream", "task.tokens=100", "task.documents=1", "compress=int8_static", *few)
    assert {record["status"] for record in found} == {"ok"}
    with pytest.raises(SystemExit, match=f"the model has {PLACES}"):
        retrieval_heads.main([*here, "tokens=100", f"out={tmp_path / 'heads.json'}"])
