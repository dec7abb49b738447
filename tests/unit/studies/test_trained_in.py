"""The trained-in study: designs of one size, texts that ask what was bound, a model that is trained once, a figure that is XML."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.kv.compat import shape_of
from studies.trained_in import train
from studies.trained_in.designs import DESIGNS, configuration, size
from studies.trained_in.figure import svg
from studies.trained_in.start import start_alike
from studies.trained_in.texts import BOS, IGNORED, KEYS, LENGTH, recall_batch, write_questions

BYTES_A_TOKEN = {"MHA": 1024, "GQA": 512, "MQA": 256, "MLA": 320, "shared layers": 512}  # bfloat16, 4 layers


def test_designs_are_of_one_size_and_their_caches_are_not() -> None:
    sizes = {design: size(configuration(design)) for design in DESIGNS}
    assert max(sizes.values()) / min(sizes.values()) < 1.01
    for design in DESIGNS:
        shape = shape_of(configuration(design))
        if design in BYTES_A_TOKEN:
            assert shape.full_bytes(49, 2) == 49 * BYTES_A_TOKEN[design], design
    mha, mixed, window = (shape_of(configuration(one)).full_bytes(49, 2) for one in ("MHA", "window + global", "window"))
    assert window < mixed < mha


def test_digits_of_questions_are_those_that_were_bound() -> None:
    ids, digits, echoes = recall_batch(random.Random(0), 8)
    for row, wanted, second in zip(ids.tolist(), digits.tolist(), echoes.tolist(), strict=True):
        assert (len(row), row[0]) == (LENGTH, BOS)
        triples = [bytes(row[at : at + 3]).decode() for at in range(1, LENGTH, 3)]
        bound = {one[0]: one[1] for one in triples if one[0] == one[2]}
        asked = triples[len(bound) :]
        assert 2 <= len(bound) <= KEYS and all(one[0] == " " and bound[one[1]] == one[2] for one in asked)
        assert [n for n in wanted if n != IGNORED] == [ord(one[2]) for one in asked]
        assert [n for n in second if n != IGNORED] == [ord(key) for key in bound]


def test_a_question_of_the_evaluation_has_its_answer_in_its_context(tmp_path: Path) -> None:
    write_questions(path := tmp_path / "questions.jsonl")
    first = path.read_bytes()
    for line in map(json.loads, path.read_text().splitlines()):
        key, (answer,) = line["question"].strip(), line["answers"]
        assert len(line["context"]) == 3 * KEYS and f"{key}{answer}{key}" in line["context"]
    write_questions(path)
    assert path.read_bytes() == first


@pytest.mark.parametrize("design", ["MHA", "MQA", "MLA", "shared layers"])
def test_a_token_starts_by_attending_to_tokens_like_itself(design: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(design), attn_implementation="eager")
    start_alike(model)
    with torch.no_grad():
        seen = model(input_ids=torch.tensor([[5, 9, 7, 3, 9]]), output_attentions=True).attentions
    last = seen[0][0, :, -1].mean(0)  # of the second 9, over the heads; rotation turns some of a head's channels away
    assert last[1] > 1.4 * last[[0, 2, 3]].max()


def test_a_model_is_trained_once_and_again_for_another_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prose, recipe = bytes(range(97, 123)) * 20, train.Recipe(steps=2, recall_rows=2, prose_rows=2)
    config = configuration("GQA")
    place = train.trained(config, 0, prose, tmp_path, recipe)
    assert {path.name for path in place.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", train.RECIPE}
    before = dict(AutoModelForCausalLM.from_pretrained(place).state_dict())
    monkeypatch.setattr(train, "_fresh", lambda config, seed: pytest.fail("trained again"))
    assert train.trained(config, 0, prose, tmp_path, recipe) == place
    monkeypatch.undo()
    other = train.trained(config, 0, prose, tmp_path, replace(recipe, steps=3))
    after = AutoModelForCausalLM.from_pretrained(other).state_dict()
    assert other != place and any(not torch.equal(before[name], after[name]) for name in before)


def test_the_figure_shows_every_model() -> None:
    rows = [(design, seed, 0.5, 0.4, 0.6, 100.0 * (n + 1)) for n, design in enumerate(DESIGNS) for seed in (0, 1)]
    table = pd.DataFrame(rows, columns=["design", "seed", "recall", "recall_lo", "recall_hi", "bytes_per_token"])
    drawn = ElementTree.fromstring(svg(table, 0.1))
    assert len(drawn.findall("{*}circle")) == len(rows)
    words = {one.text for one in drawn.findall("{*}text")}
    assert {*DESIGNS, "a guess"} <= words
