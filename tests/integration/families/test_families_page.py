"""The committed table of families: what it says of each is what a trial finds, and no family is silently wrong."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import transformers

from harness.engine.engine import Engine
from harness.families import page, trial
from harness.families.__main__ import HOME, main, write
from harness.families.tiny import VOCABULARY, families
from harness.families.trial import HONOURED, NOT_BUILT, PARTLY, REFUSED, WRONG, Verdict, try_family
from harness.kv import honoured
from harness.kv.forward import Forward
from harness.kv.shape import LayerShape

COMMITTED = {row["family"]: row for row in csv.DictReader((HOME / "families.csv").read_text(encoding="utf-8").splitlines())}
SAME_VERSION = f"transformers {transformers.__version__} " in (HOME / "families.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_a_trial_finds_what_the_table_says(family: str) -> None:
    """On other versions of transformers than the table's: no family is run and gives another result."""
    found = try_family(family)
    assert found.status != WRONG, found.reason
    if SAME_VERSION:
        said = COMMITTED[family]
        assert (found.status, found.layers) == (said["status"], said["layers"])
        assert found.status == NOT_BUILT or found.reason == said["reason"]
        assert str("" if found.cached_bytes is None else found.cached_bytes) == said["cached_bytes"]


def test_the_table_is_of_all_families_and_says_why() -> None:
    statuses = [row["status"] for row in COMMITTED.values()]
    assert set(statuses) <= {HONOURED, PARTLY, REFUSED, NOT_BUILT}
    assert statuses.count(HONOURED) >= 100
    assert all(row["reason"] for row in COMMITTED.values() if row["status"] != HONOURED)
    if SAME_VERSION:
        assert sorted(COMMITTED) == families()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_family_that_is_honoured(family: str) -> None:
    found = try_family(family)
    assert (found.status, found.difference) == (HONOURED, 0.0), found.reason


def test_a_window_that_is_not_kept_to_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forward, "mask", lambda run, past, length, window, device: _causal(past, length))
    monkeypatch.setattr(honoured, "check", lambda *given: None)
    assert "everything kept" in _wrong("gemma3_text")


def test_bytes_that_are_not_counted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerShape, "token_bytes", lambda layer, itemsize: layer.heads * layer.d_key * itemsize)
    assert "bytes" in _wrong("llama")


def test_tokens_that_are_read_after_eviction_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    readable = trial._readable
    monkeypatch.setattr(trial, "_readable", lambda *given: {i: [p[:-1] for p in kept] for i, kept in readable(*given).items()})
    assert "tokens masked" in _wrong("llama")


def test_logits_that_are_no_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Engine.feed
    monkeypatch.setattr(Engine, "feed", lambda *given: (feed(*given)[0], torch.full((1, VOCABULARY), torch.nan)))
    assert "differ from transformers' by inf" in _wrong("llama")


def test_what_fails_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(trial, "_tried", broken)
    assert _wrong("llama") == "RuntimeError: two lines"
    monkeypatch.setattr(trial, "tiny_config", broken)
    assert try_family("llama").status == NOT_BUILT


def _wrong(family: str) -> str:
    found = try_family(family)
    assert found.status == WRONG
    return found.reason


def _causal(past: int, length: int) -> torch.Tensor:
    return (torch.arange(past + length)[None] <= torch.arange(past, past + length)[:, None])[None, None]


def test_the_command_prints_a_line_a_family_and_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama", "t5gemma"]) == 2
    assert "t5gemma" in capsys.readouterr().err
    assert main(["llama", "xlnet"]) == 0
    llama, xlnet, counts = capsys.readouterr().out.splitlines()
    assert llama == "llama: honoured" and xlnet.startswith("xlnet: refused (")
    assert counts == "2 families: 1 honoured, 0 partly, 1 refused, 0 not built, 0 wrong"


def test_the_page_has_a_table_a_status(tmp_path: Path) -> None:
    made = [Verdict("a", HONOURED, difference=0.0, layers="1 of 4", positions_cache=True), Verdict("b", REFUSED, "it | is odd")]
    write(tmp_path, made)
    text = (tmp_path / "families.md").read_text()
    assert "| `a` | 1 of 4 | every bit equal | yes |  |" in text and "| `b` | it \\| is odd |" in text
    assert [row["status"] for row in csv.DictReader((tmp_path / "families.csv").read_text().splitlines())] == [
        HONOURED,
        REFUSED,
    ]
    assert page.counts(made).startswith("2 families: 1 honoured")
