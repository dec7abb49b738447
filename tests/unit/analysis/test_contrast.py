"""Points against a named point: the difference by hand, its mirror image, who is paired with whom, and the command."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness import report
from harness.analysis.contrast import COLUMNS, contrasts
from harness.analysis.points import points
from harness.errors import UserError
from tests.support.record_factory import make, perplexity, sha, sweep, write_shard
from tests.support.stream_factory import stream

NEEDLE = "smollm2-needle-0a1b2c3d"


def run(stack: str, scores, **more):
    return [make(example_id=f"e{i}", group_id=f"g{i}", stack=stack, score=s, **more) for i, s in enumerate(scores)]


def only(records, label: str, against: str) -> pd.Series:
    frame = contrasts(records, [against]).frame
    return frame[frame["label"] == label].iloc[0]


def test_a_proportion_has_newcombes_interval_and_the_exact_binomial_tail() -> None:
    # the paired table (36, 12, 2, 0) of Newcombe 1998, whose limits are 0.0569 and 0.3404; full is another matter
    one, other = [1] * 36 + [1] * 12 + [0] * 2, [1] * 36 + [0] * 12 + [1] * 2
    records = run("full", [1] * 50) + run("k4v2", one, kv_bytes_context=300) + run("k2v4", other, kv_bytes_context=400)
    made = only(records, "k4v2", "k2v4")
    assert (made["n"], made["against_n"], made["n_shared"]) == (50, 50, 50)
    assert (made["score"], made["against_score"]) == (48 / 50, 38 / 50)
    assert made["diff_to_against"] == pytest.approx(0.2)
    assert (made["diff_lo"], made["diff_hi"]) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    assert made["mcnemar_p"] == pytest.approx(2 * (1 + 14 + 91) / 2**14)
    assert made["verdict"] == "above"
    assert (made["bytes_context"], made["bytes_against"], made["bytes_ratio"]) == (300, 400, 0.75)
    assert pd.isna(made["reason"])


def test_a_stream_is_a_difference_of_perplexities_over_resampled_documents(tmp_path: Path) -> None:
    records = stream(tmp_path, ["full", "h2o"], [0.25, 0.5], documents=30)
    rng = np.random.default_rng(5)
    for record in records:  # documents of unequal length, read unequally badly
        record["weight"] = 100.0 + 40 * int(record["example_id"][3:])
        record["score"] += rng.normal(0, 0.2)
    made = only(records, "h2o 0.25", "h2o 0.5")
    small, large = ([r for r in records if r["point"] == {"keep.budget.value": b}] for b in (0.25, 0.5))

    def ppl(chosen) -> float:
        return math.exp(sum(r["score"] * r["weight"] for r in chosen) / sum(r["weight"] for r in chosen))

    drawn = [rng.integers(0, 30, 30) for _ in range(4000)]
    differences = [ppl([small[i] for i in lot]) - ppl([large[i] for i in lot]) for lot in drawn]
    low, high = np.quantile(differences, (0.025, 0.975))
    assert made["diff_to_against"] == pytest.approx(ppl(small) - ppl(large))
    assert made["score"] == pytest.approx(ppl(small)) and made["against_score"] == pytest.approx(ppl(large))
    width = high - low  # ours is a little wider: 30 documents stand for all
    assert (made["diff_lo"], made["diff_hi"]) == pytest.approx((low, high), abs=0.1 * width)
    assert math.isnan(made["mcnemar_p"])
    assert made["bytes_ratio"] == pytest.approx(0.5, rel=1e-3)


def test_a_against_b_mirrors_b_against_a() -> None:
    records = sweep(stacks=["full", "int4", "h2o", "snapkv"])
    labels = points(records)["label"].tolist()
    table = contrasts(records, labels).frame.set_index(["label", "against"])
    assert len(table) == len(labels) * (len(labels) - 1)
    for one, other in itertools.combinations(labels, 2):
        a, b = table.loc[(one, other)], table.loc[(other, one)]
        mirrored = (-b["diff_to_against"], -b["diff_hi"], -b["diff_lo"], b["mcnemar_p"], 1 / b["bytes_ratio"])
        there = (a["diff_to_against"], a["diff_lo"], a["diff_hi"], a["mcnemar_p"], a["bytes_ratio"])
        assert there == pytest.approx(mirrored), (one, other)
    assert table["diff_to_against"].nunique() > 10


@pytest.mark.parametrize(
    "records",
    [
        sweep(stacks=["full", "int8", "h2o", "snapkv"]) + sweep(stacks=["full", "h2o"], query_aware=True),
        perplexity("full", [2.0, 2.5, 3.0]) + perplexity("int8", [2.1, 2.6, 3.2]) + perplexity("int4", [900.0] * 3),
    ],
    ids=["needle", "perplexity"],
)
def test_against_full_is_what_the_points_table_says(records) -> None:
    identity = ["run_id", "query_aware", "label"]
    table = points(records)
    table = table[table["stack"] != "full"].set_index(identity)
    made = contrasts(records, ["full"]).frame.set_index(identity)
    assert made.index.equals(table.index)
    same = {"full_score": "against_score", "full_lo": "against_lo", "full_hi": "against_hi", "vs_full": "verdict"}
    same |= {"diff_to_full": "diff_to_against", "diff_reason": "reason", "ratio": "bytes_ratio"}
    same |= {name: name for name in ("n", "score", "score_lo", "diff_lo", "diff_hi", "mcnemar_p", "bytes_context")}
    for column, own in same.items():
        pd.testing.assert_series_equal(made[own], table[column], check_names=False)


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ([{"prompt_sha256": sha(i)} for i in range(10)], 0),
        ([{"seed": 1}] * 10, 0),
        ([{}] * 7 + [{"prompt_sha256": "other"}] * 3, 7),
        ([{}] * 9 + [{"status": "failed", "score": None, "error": "out of memory"}], 9),
        ([{}] * 9 + [{"truncated": True}], 9),
    ],
)
def test_other_examples_give_no_number_and_the_reason(changes, shared: int) -> None:
    other = [record | more for record, more in zip(run("tova", [1] * 10), changes, strict=True)]
    made = only(run("full", [1] * 10) + run("h2o", [1, 0] * 5) + other, "h2o", "tova")
    assert made["reason"] == f"tova was scored on {shared} of these 10 prompts (same hash and seed)"
    assert (made["n"], made["n_shared"], made["score"]) == (10, shared, 0.5)
    empty = [
        "against_score",
        "against_lo",
        "diff_to_against",
        "diff_lo",
        "diff_hi",
        "mcnemar_p",
        "bytes_against",
        "bytes_ratio",
    ]
    assert made[empty].isna().all()
    assert made["verdict"] == ""


def test_failed_records_never_enter() -> None:
    one, other = run("h2o", [1, 0, 1, 1]), run("tova", [1, 1, 0, 0])
    one[2] |= {"status": "failed", "score": 1.0}
    made = only([*one, *other], "h2o", "tova")
    assert (made["n"], made["against_n"], made["n_shared"]) == (3, 4, 3)
    assert made["diff_to_against"] == pytest.approx(2 / 3 - 2 / 3)
    assert made["against_score"] == pytest.approx(2 / 3)
    dead = [record | {"status": "failed", "score": None} for record in one]
    assert only([*dead, *other], "h2o", "tova")["reason"] == "no scored example"
    assert only([*dead, *other], "tova", "h2o")["reason"] == "h2o was scored on 0 of these 4 prompts (same hash and seed)"


def test_runs_modes_and_attention_functions_are_never_paired() -> None:
    records = run("h2o", [1, 0]) + run("tova", [1, 1])
    others = ({"run_id": "r2"}, {"query_aware": True}, {"attn": "eager"})
    alone = [record for more in others for record in run("tova", [0, 0], **more)]
    made = contrasts(records + alone, ["h2o"])
    assert made.frame[["run_id", "label", "diff_to_against"]].values.tolist() == [[NEEDLE, "tova", 0.5]]
    assert made.problems == [
        "run r2, query-agnostic, attn=harness: no point h2o to compare with",
        f"run {NEEDLE}, query-aware, attn=harness: no point h2o to compare with",
        f"run {NEEDLE}, query-agnostic, attn=eager: no point h2o to compare with",
    ]


def test_configurations_that_read_alike_are_compared_by_their_number() -> None:
    records = run("h2o", [1, 1], stack_config={"a": 1}) + run("h2o", [0, 0], stack_config={"a": 2})
    assert contrasts(records, ["h2o #2"]).frame[["label", "diff_to_against"]].values.tolist() == [["h2o", 1.0]]


def test_columns_are_typed_with_and_without_rows() -> None:
    frame = contrasts(run("h2o", [1]) + run("tova", [0]), ["tova"]).frame
    assert list(frame.columns) == list(COLUMNS)
    assert contrasts(run("h2o", [1]), []).frame.dtypes.equals(frame.dtypes)


def test_an_unknown_label_is_one_line_with_those_that_exist() -> None:
    with pytest.raises(UserError) as error:
        contrasts(run("h2o", [1]) + run("tova", [0]), ["h2o", "snapkv@9"])
    assert str(error.value) == "--against='snapkv@9' is not possible: the labels here are h2o, tova"


def test_the_command_prints_and_writes_contrasts_only_when_asked(tmp_path: Path, capsys) -> None:
    records = sweep(stacks=["full", "int4", "h2o"], repeats=2)
    late = run("late [x]", [1] * 3) + run("idle [y]", [1] * 3, storage="simulated")
    missing = [record for record in records if record["stack"] == "h2o" and record["point"]["keep.budget.value"] == 0.8][:4]
    records = [record for record in records if record not in missing]
    write_shard(tmp_path / "run", records + late)
    page = tmp_path / "out" / "page.html"
    beside = page.parent / "contrasts.csv"
    assert report.main([str(tmp_path / "run"), "--out", str(page)]) == 0
    assert "against" not in capsys.readouterr().out and not beside.exists()

    asked = ["--against", "int4", "--against", "h2o 0.5", "--against", "int4"]
    assert report.main([str(tmp_path / "run"), "--out", str(page), *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [str(beside), str(page)]
    titles = [line.strip() for line in lines if "· against" in line]
    assert titles == [
        f"smollm2 · needle · query-agnostic · contains (higher is better) · against {x}" for x in ("int4", "h2o 0.5")
    ]
    assert max(map(len, lines[:-2])) <= 120
    assert "no comparison: int4 was scored on 0 of these 3 prompts (same hash and seed): late [x], idle [y]" in lines
    assert "h2o 0.8: on the 16 of 20 prompts of int4 that it was scored on" in lines
    assert any(line.startswith("*: simulated storage") for line in lines)

    frame = pd.read_csv(beside)
    assert list(frame.columns) == list(COLUMNS)
    assert frame.groupby("against").size().to_dict() == {"int4": 9, "h2o 0.5": 9}
    half = frame[(frame["label"] == "h2o 0.5") & (frame["against"] == "int4")].iloc[0]
    assert half["diff_to_against"] == pytest.approx(half["score"] - half["against_score"])
    (shown,) = [line for line in lines if line.startswith(" h2o 0.5 ")][1:]
    assert f"{half['diff_to_against']:+.2f} [{half['diff_lo']:.2f}, {half['diff_hi']:.2f}]" in shown


def test_the_command_refuses_an_unknown_label_before_it_writes(tmp_path: Path, capsys) -> None:
    write_shard(tmp_path / "run", run("full", [1, 1]) + run("h2o", [1, 0]))
    page = tmp_path / "out" / "page.html"
    assert report.main([str(tmp_path / "run"), "--out", str(page), "--against", "h2o 7"]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "error: --against='h2o 7' is not possible: the labels here are full, h2o\n")
    assert not page.parent.exists()
