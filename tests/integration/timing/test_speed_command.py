"""The speed command on a tiny model: every stack alone, what it leaves in its cache, a refusal, and a page without a request."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from harness.speed import main
from harness.stages.budget import Amount
from harness.stages.keep import Keep
from harness.stages.score.knorm import KeyNorm
from harness.stages.stack import Stack
from harness.timing.measured import Prompt, Stopwatch
from tests.support import conf_tree, tiny_models
from tests.support.tiny_models import ids


def test_each_stack_is_timed_as_it_runs_alone_and_a_refusal_is_its_own() -> None:
    engine = tiny_models.engine("llama")
    small = Stack(keep=Keep(scorer=KeyNorm(), budget=Amount(unit="bytes", value=10)))
    stacks = {"full": Stack(), "int8": conf_tree.stack("int8"), "small": small, "chunked": conf_tree.stack("h2o_chunked")}
    found = Stopwatch(engine, Prompt(tuple(ids(60)), new=3)).measure(stacks, repeats=2, warm_up=1)
    prefix = engine.prefill(ids(60)[:-1])
    for name in ("full", "int8"):
        assert found[name].held == engine.compress(prefix, stacks[name]).bytes().total
    for name in ("full", "int8", "chunked"):
        assert [one.tokens for one in found[name].repeats] == [2, 2] and not found[name].error
        assert all(min(one.prefill, one.first, one.decode) > 0 for one in found[name].repeats)
        assert (found[name].transient_read or 0) > 0 and (found[name].transient_decode or 0) > 0
    assert found["chunked"].repeats[0].compress == 0
    assert "too small" in found["small"].error and not found["small"].repeats


def test_the_command_prints_a_table_and_writes_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    page = tmp_path / "speed.html"
    given = ["model=tiny_llama", "corpus=stdlib", "compress=int8", "seq=40", "new=2", "repeats=1", "warm_up=0", f"out={page}"]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "int8" in printed and "batch_invariant=true" in printed
    table = pd.read_csv(page.with_suffix(".csv"))
    assert table["arm"].tolist() == ["full", "int8"] and (table["kv_bytes"] > 0).all()
    assert "http-equiv" in page.read_text(encoding="utf-8")
    for wrong, words in (
        ("seq=9000", "seq=9000 is not possible"),
        ("seq=1,2", "seq=1,2 is not possible: one value"),
        ("task=needle", "task=needle is not possible: this command reads seq"),
        (f"out={page.with_suffix('.csv')}", ".csv is written beside it"),
        ("compress=[int8]", "several are stacks=[int8]"),
    ):
        assert main(["model=tiny_llama", wrong]) == 2
        assert words in capsys.readouterr().err


def test_a_stack_that_calibration_finds_impossible_is_its_own_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    """Found by: one stack whose basis a model does not have ended all of them. With no other stack, the command fails."""
    tiny = ["model=tiny_llama", "corpus=stdlib", "seq=40", "new=2", "repeats=1", "warm_up=0"]
    bad = '[low_rank_weights,"compress.rope=post","compress.points=[{}]"]'
    assert main([*tiny, f"stacks=[int8,{bad}]"]) == 0
    printed = capsys.readouterr().out
    assert "spans keys before RoPE" in printed and "int8" in printed
    assert main([*tiny, f"stacks=[{bad}]"]) == 1
