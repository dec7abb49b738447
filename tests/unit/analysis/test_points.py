"""Points from records: grouping, pairing, bytes, typed columns, and reading shards that were cut or are not ours."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

from harness.analysis.frontier import rank
from harness.analysis.points import CELL_COLUMNS, COLUMNS, cells, points
from harness.errors import UserError
from harness.records.shards import load_records
from tests.support.record_factory import ROW, answer, grid, make, perplexity, sha, split, sweep, write_shard


def run(stack: str, scores, **more):
    return [make(example_id=f"e{i}", group_id=f"g{i}", stack=stack, score=s, **more) for i, s in enumerate(scores)]


def row(records, stack: str) -> pd.Series:
    table = points(records)
    return table[table["stack"] == stack].iloc[0]


def test_a_sweep_becomes_one_row_per_stack_and_budget() -> None:
    table = points(sweep())
    assert len(table) == 3 + 9 * 6
    assert set(table["n"]) == {40}
    assert table["label"].is_unique
    assert table["vs_full"].isin(["", "equal within noise", "not resolved", "below", "clearly below"]).all()


def test_score_difference_and_test_over_the_same_prompts() -> None:
    made = row(run("full", [1, 1, 1, 1, 0, 1, 1, 1]) + run("h2o", [1, 0, 0, 1, 1, 1, 0, 0]), "h2o")
    assert (made["n"], made["score"], made["full_score"]) == (8, 0.5, 0.875)
    assert made["diff_to_full"] == pytest.approx(-0.375)
    assert made["mcnemar_p"] == pytest.approx(2 * (1 + 5) / 32)
    assert made["diff_lo"] < -0.375 < made["diff_hi"]
    assert pd.isna(made["diff_reason"])


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ([], "no full-cache records"),
        (run("full", [1] * 5), "5 of these 10"),
        (run("full", [1] * 10, seed=1), "0 of these 10"),
        (run("full", [1] * 10, run_id="other-run"), "no full-cache records"),
        (run("full", [1] * 10, attn="eager"), "no full-cache records"),
        ([r | {"prompt_sha256": sha(i)} for i, r in enumerate(run("full", [1] * 10))], "0 of these 10"),
        (run("full", [None] * 10, status="failed"), "0 of these 10"),
    ],
)
def test_without_an_equal_baseline_relative_columns_are_empty_with_a_reason(base, words: str) -> None:
    made = row(base + run("h2o", [1, 0] * 5), "h2o")
    assert words in made["diff_reason"]
    assert made["score"] == 0.5
    assert math.isfinite(made["score_lo"])
    assert math.isnan(made["diff_to_full"]) and math.isnan(made["full_score"]) and made["vs_full"] == ""


def test_runs_modes_phases_and_configurations_are_never_averaged() -> None:
    variants = [{}, {"run_id": "r2"}, {"query_aware": True}, {"phase": "chunked"}, {"positions": "cache"}]
    variants += [{"stack_config": {"codec": "int8"}}, {"point": {"x": 1}}, {"model": "m2"}]
    table = points([record for more in variants for record in run("h2o", [1, 0], **more)])
    assert len(table) == len(variants)
    same_run = table[(table["run_id"] == table["run_id"][0]) & (table["model"] == "smollm2") & ~table["query_aware"]]
    assert same_run["label"].is_unique


def test_seeds_are_pooled_and_named() -> None:
    made = row(run("h2o", [1, 1], seed=0) + run("h2o", [0, 0], seed=3), "h2o")
    assert (made["seeds"], made["n"], made["score"]) == ("0,3", 4, 0.5)


def test_a_rerun_under_new_code_replaces_the_old_answer() -> None:
    old, new = run("h2o", [0, 0, 0]), [r | {"key": r["key"] + "new"} for r in run("h2o", [1, 1])]
    made = row(old + new, "h2o")
    assert (made["n"], made["n_superseded"], made["score"]) == (3, 2, pytest.approx(2 / 3))


def test_failed_refused_truncated_and_missing_scores_are_counted_and_left_out() -> None:
    records = run("h2o", [1, 0, 1, 1, 1, 0.0, None])
    records[1] |= {"status": "failed", "score": None, "error": "out of memory"}
    records[2] |= {"status": "refused", "score": None, "error": "budget of 3 tokens"}
    records[3] |= {"truncated": True}
    records[4] |= {"status": "not_exercised"}
    made = row(records, "h2o")
    counts = [made[f"n_{name}"] for name in ("prompts", "failed", "refused", "truncated", "not_exercised", "unscored")]
    assert counts == [7, 1, 1, 1, 1, 1]
    assert (made["n"], made["score"]) == (3, pytest.approx(2 / 3))
    assert "out of memory (1x)" in made["error"]
    records[-1] |= {"status": "failed", "metric": "first", "higher_is_better": False}
    assert (row(records, "h2o")["metric"], row(records, "h2o")["higher_is_better"]) == (made["metric"], True)


def test_ratio_is_sum_over_sum_at_the_same_moment() -> None:
    records = run("h2o", [1, 1])
    records[0] |= {"kv_bytes_context": 10, "kv_bytes_full": 100, "kv_bytes_final": 60, "kv_bytes_full_final": 120}
    records[1] |= {"kv_bytes_context": 300, "kv_bytes_full": 900, "kv_bytes_final": 320, "kv_bytes_full_final": 1000}
    made = row(records, "h2o")
    assert made["ratio"] == pytest.approx(310 / 1000)  # not the mean of 0.1 and 0.333
    assert made["ratio_final"] == pytest.approx(380 / 1120)
    assert (made["bytes_context"], made["bytes_full"]) == (155, 500)


def test_byte_sums_by_kind_and_effective_bits() -> None:
    # 4-bit codes with an fp16 scale and zero a group of 32: 5 bits a value, 3.20x
    full = make(n_prompt=256, tokens_kept=256.0)
    parts = split({"payload": ROW * 256 // 4, "metadata": ROW * 256 // 16})
    small = make(n_prompt=256, stack="int4", tokens_kept=256.0, bytes=parts, kv_bytes_context=ROW * 256 * 5 // 16,
                 stack_config={"kv_dtype": "bfloat16"})  # fmt: skip
    made = row([full, small], "int4")
    assert made["effective_bits"] == 5.0
    assert 1 / made["ratio"] == pytest.approx(3.2)
    assert made["allocated_metadata"] == ROW * 16
    assert made["bytes_logical"] == made["bytes_context"]
    unknown = row([full, small | {"stack_config": {}, "kv_dtype": ""}], "int4")
    assert math.isnan(unknown["effective_bits"])


def test_budgets_of_all_kinds_share_typed_columns_and_parquet_is_written(tmp_path) -> None:
    budgets = [64, "full", None, 0.5, {"unit": "tokens", "value": 64}, {"unit": "fraction", "value": 0.5}]
    records = [make(stack=f"s{i}", stack_config={"keep": {"budget": b}}) for i, b in enumerate(budgets)]
    records.append(
        make(
            stack="swept",
            stack_config={"keep": {"budget": {"unit": "bytes", "value": 1}}},
            point={"keep.budget.value": 4096},
        )
    )
    table = points(records)
    assert {name: str(kind) for name, kind in table.dtypes.items()}.keys() == COLUMNS.keys()
    assert table["budget_value"].dtype == float
    assert table["budget_unit"].fillna("-").tolist() == ["-", "full", "-", "-", "tokens", "fraction", "bytes"]
    assert table["budget_value"].fillna(-1).tolist() == [64, -1, -1, 0.5, 64, 0.5, 4096]
    table.to_parquet(tmp_path / "points.parquet")
    again = pd.read_parquet(tmp_path / "points.parquet")
    assert again.dtypes.equals(table.dtypes)


def test_an_empty_table_has_the_same_types(tmp_path) -> None:
    assert points([]).dtypes.equals(points([make()]).dtypes)
    assert cells([]).dtypes.equals(cells([make()]).dtypes)
    rank(points([])).to_parquet(tmp_path / "empty.parquet")


def test_perplexity_columns() -> None:
    made = row(perplexity("full", [2.0, 2.5, 3.0]) + perplexity("int8", [2.1, 2.6, 3.1]), "int8")
    weights = [100, 110, 120]
    right = math.exp(sum(w * s for w, s in zip(weights, [2.1, 2.6, 3.1], strict=True)) / sum(weights))
    assert made["score"] == pytest.approx(right)
    assert made["diff_to_full"] == pytest.approx(right - right / math.exp(0.1))
    assert made["nll_diff"] == pytest.approx(0.1) and made["nll_diff_lo"] <= 0.1 <= made["nll_diff_hi"]
    assert not made["higher_is_better"]
    assert made["discriminative"]


@pytest.mark.parametrize(
    ("scores", "chance", "expected"),
    [([1] * 10, 0.0, True), ([0] * 10, 0.0, False), ([1, 0] * 10, 0.5, False), ([0] * 39 + [1], 0.0, False)],
)
def test_a_full_cache_at_chance_or_floor_is_not_discriminative(scores, chance: float, expected: bool) -> None:
    made = row(run("full", scores, chance=chance) + run("h2o", scores, chance=chance), "h2o")
    assert bool(made["discriminative"]) is expected


def test_cells_split_by_length_and_depth() -> None:
    records = [answer(e, s, f) for e in grid(repeats=3) for s, f in (("full", None), ("h2o", 0.2))]
    table = cells([*records, make(length=None, depth=None)])
    assert list(table.columns) == list(CELL_COLUMNS)
    assert len(table) == 2 * 2 * 5
    assert set(table["n"]) == {3}
    assert table.groupby("label")["score"].mean()["full"] == 1.0
    assert sorted(set(table["label"])) == ["full", "h2o 0.2"]


def test_shards_are_read_the_latest_of_a_key_wins_and_a_cut_line_is_passed_over(tmp_path) -> None:
    import os

    first = run("h2o", [0, 0, 0])
    shard = write_shard(tmp_path, first, "a")
    os.utime(shard, (1, 1))
    later = write_shard(tmp_path, [first[0] | {"score": 1.0}], "b")
    with later.open("ab") as file:
        file.write(json.dumps(first[1]).encode()[:-30] + "é".encode()[:1])
    loaded = load_records(tmp_path)
    assert (len(loaded), loaded.duplicates, loaded.half_written) == (3, 1, 1)
    assert sum(record["score"] for record in loaded) == 1.0


def test_old_nan_is_read_as_missing_and_infinity_stays(tmp_path) -> None:
    records = [make(example_id=f"e{i}") for i in range(3)]
    shard = write_shard(tmp_path, records)
    lines = shard.read_text().splitlines()
    words = ["NaN", "Infinity", '"Infinity"']
    shard.write_text("\n".join(line.replace('"score": 1.0', f'"score": {w}') for line, w in zip(lines, words, strict=True)))
    made = row(load_records(tmp_path).records, "full")
    assert (made["n"], made["n_unscored"]) == (2, 1)
    assert math.isinf(made["score"])


@pytest.mark.parametrize(
    "text", ["hello\n", '{"a": 1}\n', "[1]\n", '{"key": "k", "schema": 99, "run_id": "r", "stack": "s"}\n']
)
def test_foreign_files_are_refused_in_one_line(tmp_path, text: str) -> None:
    (tmp_path / "records-x.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"records-x\.jsonl:1") as error:
        load_records(tmp_path)
    assert "\n" not in str(error.value)


DAMAGE = {
    "key": ["a"], "example_id": ["a"], "status": "done", "score": "x", "weight": {}, "metrics": {"strict": "x"}, "point": "x",
    "tokens_kept": "many", "kv_bytes_context": "1", "stack_config": None, "stack": {}, "written_at": "noon",
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_value_that_no_record_has_is_one_line_that_says_where_and_is_passed_over(tmp_path, name: str, capsys) -> None:
    shard = write_shard(tmp_path, [make(), make(example_id="other") | {name: DAMAGE[name]}])
    loaded = load_records(tmp_path)
    assert [record["example_id"] for record in loaded] == [make()["example_id"]] and len(loaded.unfit) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{shard}:2 is no whole record: {name}=") and line.endswith("passed over")


def test_what_a_task_says_in_its_own_types_is_read(tmp_path) -> None:
    write_shard(tmp_path, [make(example_id=7, group_id=8, length="long", score=True, metrics={"strict": "Infinity"})])
    (only,) = load_records(tmp_path)
    assert only["example_id"] == 7 and only["score"] is True


def test_missing_folder_and_missing_shards_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        load_records(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no records"):
        load_records(tmp_path)


def test_answer_flips_count_answers_that_are_not_the_full_caches_right_or_wrong() -> None:
    full = [make(example_id=str(i), output=f"answer {i}") for i in range(4)]
    small = [make(example_id=str(i), stack="int4", output=f"answer {i}" if i else "other", score=1.0) for i in range(4)]
    assert row([*full, *small], "int4")["answer_flips"] == 0.25
    assert row([*full, *small], "full")["answer_flips"] == 0.0
    silent = [record | {"output": None} for record in small]
    assert math.isnan(row([*full, *silent], "int4")["answer_flips"])


@pytest.mark.parametrize("place", [{"length": "long"}, {"depth": "<b>deep</b>"}, {"length": None}])
def test_a_place_that_is_no_number_is_on_no_map(place) -> None:
    """Found by: a report ended in a traceback on records whose length or depth was a word, which the schema allows."""
    records = [make(example_id=f"e{i}", **place) for i in range(3)] + [make(example_id="placed")]
    assert cells(records)["n"].tolist() == [1]
    assert points(records)["n"].tolist() == [4]
