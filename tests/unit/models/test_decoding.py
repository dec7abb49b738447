"""Greedy decoding of raw logits is what is done; settings that ask for something else are named, those that do not are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from harness.models.decoding import decoding
from tests.support.running import VOCABULARY, on_disk, run
from tests.support.tiny_models import tiny_a

SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "greedy"),
        ({"bos_token_id": 1, "eos_token_id": [2, 3], "max_length": 4096, "use_cache": True}, "greedy"),
        ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.0, "num_beams": 1, "do_sample": False}, "greedy"),
        ({"length_penalty": 2.0, "suppress_tokens": [], "min_length": 0}, "greedy"),
        ({"repetition_penalty": 1.2, "num_beams": 4}, "greedy; not honoured: num_beams=4, repetition_penalty=1.2"),
        (SAMPLED, "greedy; not honoured: do_sample=True, temperature=0.6, top_p=0.9"),
        ({"num_beams": 2, "length_penalty": 2.0}, "greedy; not honoured: length_penalty=2.0, num_beams=2"),
        ({"suppress_tokens": [5, 6], "no_repeat_ngram_size": 3}, "greedy; not honoured: no_repeat_ngram_size=3, suppress_tokens=[5, 6]"),
        ({"suppress_tokens": list(range(90))}, "greedy; not honoured: suppress_tokens=[90 entries]"),
        ({"a_setting_of_tomorrow": 3}, "greedy; not honoured: a_setting_of_tomorrow=3"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_named(settings: dict, words: str) -> None:
    assert decoding(settings) == words


def test_defaults_of_transformers_ask_for_nothing() -> None:
    assert decoding(GenerationConfig().to_diff_dict()) == "greedy"
    assert decoding(GenerationConfig(**SAMPLED, eos_token_id=2).to_diff_dict()).endswith("temperature=0.6, top_p=0.9")


def test_the_record_says_so_where_something_is_decoded(tmp_path: Path) -> None:
    """Found by: a generation_config with a repetition penalty and suppressed tokens, ignored without a word."""
    settings = tiny_a(vocab_size=VOCABULARY)
    here = on_disk(tmp_path / "model", settings)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.2, "suppress_tokens": [5]}))
    words = "greedy; not honoured: repetition_penalty=1.2, suppress_tokens=[5]"
    found = run(tmp_path / "out", *here, "task=needle", "task.lengths=[400]", "limit=1", "compress=int8")
    assert [record["decoding"] for record in found] == [words, words]
    found = run(tmp_path / "out", *here, "task=stream", "task.tokens=64", "task.documents=1", "compress=full")
    assert [record["decoding"] for record in found] == [""]
